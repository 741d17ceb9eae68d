"""Environments: what an episode is made of, the built-in ones, and the tools that they offer."""
