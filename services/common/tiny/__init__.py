"""Small generated models, tasks and texts, for trying a recipe."""
