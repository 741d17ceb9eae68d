"""The KV cache of the torch engine: rows, or a pool of blocks."""
