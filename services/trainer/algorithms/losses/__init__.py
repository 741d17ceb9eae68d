"""Losses per token, one short file each."""
