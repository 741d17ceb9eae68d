"""Where executions and judgements wait for a slot: here (embedded), or at workers on any node (streams)."""
