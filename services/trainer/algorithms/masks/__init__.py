"""Masks: tokens that a loss leaves out."""
