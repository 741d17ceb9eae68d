"""Rewards of completions: built-in graders and functions named by import path."""
