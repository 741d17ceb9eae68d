"""Serving HTTP: what the services that do share."""
