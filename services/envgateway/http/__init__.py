"""The HTTP interface that clients of Code Judge speak, beside gRPC."""
