"""The torch engine: continuous batching over a slot KV cache, on the CPU or one GPU."""
