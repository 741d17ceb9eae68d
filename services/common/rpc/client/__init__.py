"""The calling side of gRPC: channels, deadlines, health, and the state of a peer."""
