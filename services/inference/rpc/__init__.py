"""Clients of the orchestrator and of the environment gateway."""
