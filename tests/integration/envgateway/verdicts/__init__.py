"""Real rows and their expected verdicts: reference solutions, mutants of them, our own contest solutions."""
