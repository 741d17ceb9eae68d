"""Processes, threads, memory, disks and devices of this machine."""
