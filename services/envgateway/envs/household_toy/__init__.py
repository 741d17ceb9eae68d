"""``household_toy``: a small house in words, drawn by seed. Find a thing, carry the thing to a place. No dependencies."""
