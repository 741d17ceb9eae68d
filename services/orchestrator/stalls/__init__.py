"""Detects stalls of a run: the component, the cause, the start and the advice."""
