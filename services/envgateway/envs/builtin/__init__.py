"""Built-in environments without a world: single step, tool loop, tool calls."""
