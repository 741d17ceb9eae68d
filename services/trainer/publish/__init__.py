"""Publishes weight versions: snapshots, deltas, and the process that serves them."""
