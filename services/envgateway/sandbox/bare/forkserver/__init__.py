"""Warm interpreters that fork a confined child per run: the supervisor's handle, and the process."""
