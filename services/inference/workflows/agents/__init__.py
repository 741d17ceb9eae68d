"""Rollouts of external agents: captured conversations, stop texts, messages, the workflow."""
