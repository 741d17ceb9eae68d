"""Tools that the gateway runs for a policy: interface, registry, and the calls of one trajectory."""
