"""Real rows and what the judge must say of them: reference solutions, mutants of them, our own contest solutions."""
