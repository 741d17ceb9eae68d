"""Chat templates, tokenizers, tool calls and programs in a policy's text."""
