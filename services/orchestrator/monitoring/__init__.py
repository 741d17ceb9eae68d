"""Monitoring for people and tools: periodic checks, progress, gauges and stalls."""
