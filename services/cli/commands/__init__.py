"""Commands of ``millrace``, by subject."""
