"""Ray: the actors, each a thin wrapper of a class of `cluster`, their places, and what starts and stops them."""
