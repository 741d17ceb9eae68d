"""Sends the metrics of a run to trackers, in a process of its own that follows ``metrics/orchestrator.jsonl``."""
