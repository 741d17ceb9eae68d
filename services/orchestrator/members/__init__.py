"""Replicas and trainers of the run: leases, slots and the commands on their way."""
