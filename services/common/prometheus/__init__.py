"""Metrics for Prometheus: the gauges of a process under conventional names."""
