"""Many requests out of a file, answered by a server into another: read, checked, run, kept."""
