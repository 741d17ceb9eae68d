"""Environments that AgentBench's servers play: a classic controller, or a task-server adapter or a pool of them."""
