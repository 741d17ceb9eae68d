"""Workers: they take jobs from the streams in Redis and run them in a sandbox of their own."""
