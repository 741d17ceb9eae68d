"""gRPC side of the gateway: servicers, deadlines, batched calls, membership in a run."""
