"""``textworld``: text games, from files or made by seed."""
