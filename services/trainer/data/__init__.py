"""Packs training sequences into rows, and checks batches."""
