"""Ranks of one trainer: the process group, exchanges of texts, and the detection of lost ranks."""
