"""Generation by SGLang servers: child processes of this one, spoken to in ``client`` alone."""
