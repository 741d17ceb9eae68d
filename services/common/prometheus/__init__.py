"""Metrics for Prometheus: what a process already knows, under names that its tools know."""
