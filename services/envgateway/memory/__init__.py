"""Answers of the sandbox that are known and need not be found again: verdicts and runs of deterministic programs."""
