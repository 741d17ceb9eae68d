"""``rollmill watch``, ``pause`` and ``stop``: talk to the orchestrator of a run and show its progress."""
