"""The OpenAI-compatible endpoint: HTTP access to captured sessions."""
