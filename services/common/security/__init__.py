"""Who may call whom: key material of a run, identities, tokens, and the table of who may do what."""
