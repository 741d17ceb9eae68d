"""``rollmill checkpoints`` and ``rollmill export``: the checkpoints of a run, from its directory alone."""
