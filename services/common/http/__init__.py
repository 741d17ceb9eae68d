"""HTTP servers: parts that all services share."""
