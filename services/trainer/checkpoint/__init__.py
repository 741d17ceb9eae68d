"""Durable checkpoints, and the Hugging Face export at the end of a run."""
