"""Jobs over Redis Streams: the gateway's side, and what it shares with the workers."""
