"""Tools of MCP servers: over standard input and output, and over streamable HTTP."""
