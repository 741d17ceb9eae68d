"""An MCP server with two tools (``make extra EXTRA=mcp``).

    envgateway: {mcp: {units: {command: [python, ./mcp_server.py], sessions: shared}}}
    workflow: {name: tool_use, settings: {tools: ["mcp:units"], reward: "reward:exact_match"}}

Over HTTP: ``python mcp_server.py --http 8100``, and ``{url: "http://127.0.0.1:8100/mcp", sessions: shared}``.
"""

import sys

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server = MCPServer("units")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool()
def minutes(hours: float) -> str:
    """Minutes in a number of hours."""
    if hours < 0:
        raise ToolError("hours cannot be negative")
    return f"{hours * 60:g}"


if __name__ == "__main__":
    if sys.argv[1:2] == ["--http"]:
        server.run("streamable-http", port=int(sys.argv[2]))
    else:
        server.run()
