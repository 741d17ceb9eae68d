"""State of the run in memory: task groups, quotas, versions, phase and scores."""
