"""``millrace checkpoints`` and ``millrace export``: the checkpoints of a run, from its directory alone."""
