"""Names what keeps a run from going on: who is the cause, which cause, since when, and what to do."""
