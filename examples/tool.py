"""Two tools: one that computes, one that runs a program in the gateway's sandbox.

    workflow: {name: tool_use, settings: {tools: ["tool:minutes", "tool:sort_lines"], reward: math}}

``minutes`` can also run in the gateway: ``envgateway: {tools: {paths: ["tool:minutes"]}}``.
"""

from typing import Annotated

import rollmill


@rollmill.tool
def minutes(hours: Annotated[float, "a number of hours"], round_up: bool = False) -> str:
    """Minutes in a number of hours."""
    if hours < 0:
        raise rollmill.ToolError("hours cannot be negative")
    return f"{-(-hours * 60 // 1) if round_up else hours * 60:g}"


@rollmill.tool(timeout_s=10)
async def sort_lines(text: str, gateway: rollmill.Gateway) -> str:
    """Sort the lines of a text."""
    done = await gateway.execute_code("import sys\nprint(*sorted(sys.stdin), sep='', end='')", stdin=text.encode())
    return done.stdout
