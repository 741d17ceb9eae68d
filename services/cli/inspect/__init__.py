"""Commands that read a run's directory: metrics, journal, traces, checkpoints, weights."""
