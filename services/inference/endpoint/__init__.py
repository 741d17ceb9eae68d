"""The OpenAI-compatible endpoint: HTTP round captured sessions."""
