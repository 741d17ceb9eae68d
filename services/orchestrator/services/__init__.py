"""gRPC services of the orchestrator: they convert messages and call the parts behind them."""
