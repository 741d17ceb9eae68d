"""Serving HTTP on loopback: what the services that do share."""
