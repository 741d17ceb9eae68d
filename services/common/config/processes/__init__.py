"""Settings of the processes of a run and of where they run."""
