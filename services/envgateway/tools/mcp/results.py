"""The text that a policy sees of an MCP tool's result, and its bound."""

from __future__ import annotations

import json
from typing import Any

from mcp.types import CallToolResult

from services.common.text.tool_calls import ToolStatus, cut_text
from services.common.tools import ToolResult

_NO_TEXT = "(no output)"


def tool_result(result: CallToolResult, max_chars: int) -> ToolResult:
    """Text blocks one below the other; another block is named with its kind and size; structured content alone is shown as
    JSON. ``is_error`` is the tool's own failure, which the policy is told."""
    text = "\n".join(part for part in map(_shown, result.content) if part)
    if not text and result.structured_content is not None:
        text = json.dumps(result.structured_content, ensure_ascii=False)
    text = bounded(text or _NO_TEXT, max_chars)
    if result.is_error:
        return ToolResult(text=f"Error: {text}", status=ToolStatus.TOOL_ERROR)
    return ToolResult(text=text)


def bounded(text: str, max_chars: int) -> str:
    """At most ``max_chars`` characters; the end of a text that is cut says so.

    >>> bounded("0123456789" * 20, 70)
    '0123456789012345678 ...(cut)...  (200 characters, cut to 70)'
    """
    if len(text) <= max_chars:
        return text
    told = f" ({len(text)} characters, cut to {max_chars})"
    return cut_text(text, max(max_chars - len(told), 16), "end") + told


def _shown(block: Any) -> str:
    match block.type:
        case "text":
            return str(block.text)
        case "image" | "audio":
            return f"({block.type} {block.mime_type}, {len(block.data) * 3 // 4} bytes, not shown)"
        case "resource":
            resource = block.resource
            return str(getattr(resource, "text", f"(resource {resource.uri}, not shown)"))
        case _:
            return f"({block.type} {getattr(block, 'uri', '')}, not shown)"
