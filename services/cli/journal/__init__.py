"""``millrace journal``: what a run's journal holds, whether it can be read, and how to mend it."""
