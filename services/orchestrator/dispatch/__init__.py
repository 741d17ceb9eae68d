"""Gives task groups, evaluations and weight versions to replicas."""
