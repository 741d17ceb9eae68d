"""Where executions and judgements wait for a slot."""
