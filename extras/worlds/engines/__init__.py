"""Games in processes of their own: engines are not thread-safe, stall and crash."""
