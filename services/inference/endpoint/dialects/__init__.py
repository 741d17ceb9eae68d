"""The dialects of the endpoint: each reads its requests into the internal form, and writes answers, events and errors."""
