"""Processes that a recipe needs, on one node or several. Starts no process."""
