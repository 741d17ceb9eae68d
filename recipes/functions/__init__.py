"""Tiny programming tasks: one-line functions from a few English words. Two demonstrations train on them."""
