"""Commands of ``rollmill``, by subject."""
