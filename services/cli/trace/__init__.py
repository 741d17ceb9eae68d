"""``millrace trace``: what happened to a task group, from the prompt to the gradient."""
