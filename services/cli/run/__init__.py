"""``rollmill run``, ``start`` and ``eval``: start processes, supervise them, stop them."""
