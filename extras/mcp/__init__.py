"""Tools of MCP servers, over standard input and output or streamable HTTP."""

PROVIDES = {
    "settings": {"mcp": "extras.mcp.settings:McpSections"},
    "tool_servers": {"mcp": "extras.mcp.servers:McpServers"},
    "server_checks": {"mcp": "extras.mcp.servers:server_problems"},
}
