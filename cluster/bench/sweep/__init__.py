"""Many runs of one load: arms, cells, figures, and what can be compared."""
