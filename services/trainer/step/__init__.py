"""One training step: from a batch to an updated model and its metrics."""
