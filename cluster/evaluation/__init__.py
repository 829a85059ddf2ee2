"""Accuracy on questions with known answers, with speculation and without."""
