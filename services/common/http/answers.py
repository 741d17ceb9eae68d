"""Answers over HTTP."""

from __future__ import annotations

import orjson
from aiohttp import web


def json_answer(value: object, status: int = 200) -> web.Response:
    """``value`` as JSON."""
    return web.Response(body=orjson.dumps(value), status=status, content_type="application/json")
