"""The process that starts runs, enforces their limits and empties their slots."""
