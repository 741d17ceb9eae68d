"""Environments: the interface, the built-in environments, and the tools that they offer."""
