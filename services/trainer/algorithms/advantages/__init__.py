"""Advantages of sequences and of single tokens."""
