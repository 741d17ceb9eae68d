"""The true SGLang server serves several adapters on one base. A newer SGLang that differs fails here first."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.common import tiny as tiny_models
from services.common.errors import ModelMismatchError
from services.common.lora import identity_of
from services.inference.engine.base import WeightUpdate
from tests.conformance.subjects import server_engine, until_tokens
from tests.random_models import (
    TOLERANCE,
    build_model,
    make_prompt,
    make_request,
    max_gap,
)
from tests.unit.inference.test_adapters import CONFIG, merged, version

pytestmark = [pytest.mark.sglang]

PROMPT = [token % 200 for token in make_prompt(30)]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("base") / "model"
    tiny_models.build(path, seed=0)
    return path


async def test_the_engine_serves_each_version_of_an_adapter_with_its_log_probabilities(
    sglang_python: str, tmp_path: Path
) -> None:
    """Before, across and after a swap, and through the death of the server."""
    model = build_model("qwen3")
    model.save_pretrained(tmp_path / "model")
    oracles = [merged(model, version(model, number)) for number in range(3)]
    identity = identity_of(model, CONFIG, "")
    engine = server_engine(
        "sglang", tmp_path / "model", version(model, 0), tmp_path, adapter=identity, dtype="float32", num_slots=4
    )
    await engine.start()
    try:
        prompt = make_prompt(30)
        first = await engine.generate(make_request(prompt, max_new_tokens=20))
        assert max_gap(oracles[0], prompt, first, first.segments[0]) <= TOLERANCE
        pending = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=400)))
        await until_tokens(engine, 60)
        await engine.update(WeightUpdate.full(version(model, 1), 1))
        across = await pending
        assert [segment.weight_version for segment in across.segments] == [0, 1]
        assert sum(segment.num_tokens for segment in across.segments) == 400
        for segment in across.segments:
            assert not segment.mixed_cache
            assert max_gap(oracles[segment.weight_version], prompt, across, segment) <= TOLERANCE
        assert max_gap(oracles[0], prompt, across, across.segments[1]) > 100 * TOLERANCE
        await engine.update(WeightUpdate.full(version(model, 2), 2))
        (server,) = engine._fleet.servers
        dying = asyncio.ensure_future(engine.generate(make_request(prompt, max_new_tokens=400)))
        await until_tokens(engine, 60)
        server.process.kill()
        revived = await dying
        assert {segment.weight_version for segment in revived.segments} == {2}
        assert max_gap(oracles[2], prompt, revived, revived.segments[0]) <= TOLERANCE
        with pytest.raises(ModelMismatchError, match="other shape"):
            await engine.update(WeightUpdate.full(version(model, 3, CONFIG.model_copy(update={"rank": 2})), 3))
    finally:
        await engine.stop()
    assert not list(tmp_path.glob("**/version-*")), "directories of versions go with them"
