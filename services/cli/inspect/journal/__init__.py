"""``rollmill journal``: list, verify, export and repair the journal of a run."""
