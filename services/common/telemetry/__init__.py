"""Logs, metrics, time accounts and the names in them."""
