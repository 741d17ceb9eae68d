"""Tasks: datasets, their rows, and the order in which the run issues them."""
