"""Ray actors, each a thin wrapper of a class of `cluster`; none is there yet."""
