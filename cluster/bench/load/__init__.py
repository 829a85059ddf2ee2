"""Load on a server of the generation API: what is asked, when, and what came of it."""
