"""The commands that need Ray."""
