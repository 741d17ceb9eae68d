"""``rollmill check``: finds errors in a recipe and on this machine before a process starts."""
