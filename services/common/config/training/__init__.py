"""Settings of a policy and of its training."""
