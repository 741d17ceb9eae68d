"""Recipes in which a tiny model guesses a number, in environments of verifiers and OpenEnv."""
