"""Gauges of a replica, their Prometheus names, and times of sampled tokens."""
