"""Waiting calls fail when an engine is stopped."""

from __future__ import annotations

import asyncio

import pytest

from services.common.errors import InfrastructureError
from services.inference.engine.base import Engine
from tests.conformance.subjects import until_tokens
from tests.random_models import make_prompt, make_request

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_stop_fails_what_is_running(engine: Engine) -> None:
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(10), max_new_tokens=580)))
    await until_tokens(engine, 1)
    await engine.stop()
    with pytest.raises(InfrastructureError, match="stopped"):
        await pending
    assert not engine.health().ok
    with pytest.raises(InfrastructureError, match="stopped"):
        await engine.generate(make_request([1, 2]))
