"""Queues of executions and judgements: for the gateway's own slots (embedded), or for workers on any node (streams)."""
