"""Keys of a run: created, renewed and handed to processes."""
