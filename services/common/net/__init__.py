"""Addresses of machines and of peers."""
