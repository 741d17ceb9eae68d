"""Pictures of runs: curves, fates, and where the time went."""
