"""The training loop and its connection to the orchestrator."""
