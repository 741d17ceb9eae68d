"""Plays task groups: slots, attempts, policies, scores of teachers, phases."""
