"""Rollouts with tool calls: the workflows ``tool_use`` and ``tool_math``, and their tools."""
