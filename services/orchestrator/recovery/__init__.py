"""Restores the parts of the orchestrator from the journal."""
