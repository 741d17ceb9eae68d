"""``millrace push``: sends an exported checkpoint and its card to a model hub."""
