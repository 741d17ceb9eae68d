"""``rollmill trace``: the life of a task group, from the prompt to the gradient."""
