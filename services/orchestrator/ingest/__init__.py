"""Checks records of replicas and makes them durable."""
