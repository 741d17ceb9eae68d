"""``rooms``: a small house in words. Find a thing, carry it to a place; drawn by seed, no dependencies, microseconds a turn."""
