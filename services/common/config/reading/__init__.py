"""From a recipe file to a validated recipe."""
