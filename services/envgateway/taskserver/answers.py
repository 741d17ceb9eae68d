"""Reading requests and writing answers: JSON both ways, with the error bodies that AgentBench's clients know."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, ValidationError

from services.common.errors import RollmillError
from services.common.http.origin import Handler
from services.common.text.encodable import encodable

Body = TypeVar("Body", bound=BaseModel)


class Refusal(Exception):
    """An answer that is no success; ``plain`` is text instead of JSON."""

    def __init__(self, status: int, detail: Any, *, plain: bool = False) -> None:
        super().__init__(f"{status}: {detail}")
        self.status = status
        self.detail = detail
        self.plain = plain


def answered(
    handle: Callable[[web.Request], Awaitable[object]], refusal_of: Callable[[RollmillError], Refusal]
) -> Handler:
    """Wraps a handler that returns a value for JSON, or raises ``Refusal`` or an error that ``refusal_of`` translates."""

    async def wrapped(request: web.Request) -> web.StreamResponse:
        try:
            return _json(await handle(request), 200)
        except (Refusal, RollmillError) as error:
            refusal = error if isinstance(error, Refusal) else refusal_of(error)
            if refusal.plain:
                return web.Response(text=str(refusal.detail), status=refusal.status)
            return _json({"detail": refusal.detail}, refusal.status)

    return wrapped


async def read(request: web.Request, model: type[Body]) -> Body:
    """Raises ``Refusal`` 422, which names the field."""
    try:
        return model.model_validate_json(await request.read())
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        detail = [{"loc": ["body", *p["loc"]], "msg": p["msg"], "type": p["type"]} for p in problems]
        raise Refusal(422, detail) from None


def _json(value: object, status: int) -> web.Response:
    body = orjson.dumps(encodable(value), option=orjson.OPT_NON_STR_KEYS)
    return web.Response(body=body, status=status, content_type="application/json")
