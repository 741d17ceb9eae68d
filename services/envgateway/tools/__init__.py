"""Tools that the gateway runs for a policy: what one is, those by name, and the calls of one trajectory."""
