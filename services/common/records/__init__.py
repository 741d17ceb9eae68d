"""Records that several services hold: trajectories, task groups, and their fates. No gRPC."""
