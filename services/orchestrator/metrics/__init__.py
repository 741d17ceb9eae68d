"""Metrics of the run as files: rows, TensorBoard events and the summary."""
