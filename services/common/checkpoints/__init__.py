"""Checkpoints of a run on disk, as the trainer writes them and the command line reads them. Imports no torch."""
