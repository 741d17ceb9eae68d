"""Authentication and authorisation: key material of a run, identities, tokens, and the table of permissions."""
