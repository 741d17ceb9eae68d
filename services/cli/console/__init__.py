"""Shared by all commands: options, signals, errors, tables and figures."""
