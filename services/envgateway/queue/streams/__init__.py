"""Jobs over Redis Streams: the gateway's side, and the parts that workers share."""
