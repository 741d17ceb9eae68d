"""Weight updates of every engine, also during a generation."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.common.errors import ModelMismatchError
from services.common.weights.codec import ChunkChange
from services.inference.engine.base import Engine, WeightUpdate
from tests.conformance.subjects import Shape, Subject, until_tokens
from tests.random_models import make_prompt, make_request

pytestmark = pytest.mark.asyncio(loop_scope="session")

OF_FLOATS: dict[str, Any] = {"dtype": "float32", "complete": False}


def one_change(position: int) -> ChunkChange:
    return ChunkChange(start=0, positions=np.array([position]), values=np.zeros(1, np.uint32), num_changes=1)


async def test_every_interruption_counts_against_the_same_budget(subject: Subject) -> None:
    """The context too: the rest of either after the last swap is not given out again."""
    engine = subject.engine
    pending = asyncio.ensure_future(engine.generate(make_request(make_prompt(150), max_new_tokens=450)))
    for version in (1, 2, 3):
        await until_tokens(engine, 20)
        await engine.update(subject.same_weights(version))
    generation = await pending
    assert [s.weight_version for s in generation.segments] == [0, 1, 2, 3]
    assert len(generation.token_ids) == 450


async def test_an_update_of_other_weights_is_refused(subject: Subject) -> None:
    engine = subject.engine
    weights = {**subject.weights, "model.norm.weight": Shape(65)}
    with pytest.raises(ModelMismatchError, match=r"model\.norm\.weight has shape \(65,\), the model \(64,\)"):
        await engine.update(WeightUpdate.full(weights, 1))
    with pytest.raises(ModelMismatchError, match="missing: model"):
        await engine.update(WeightUpdate.full({}, 1))
    assert engine.version == 0


async def test_an_update_of_some_weights_leaves_the_others(subject: Subject) -> None:
    engine = subject.engine
    some = {"model.norm.weight": subject.weights["model.norm.weight"]}
    await engine.update(WeightUpdate(version=1, whole=some, complete=False))
    await engine.update(WeightUpdate(version=2, changes={"model.norm.weight": [one_change(63)]}, **OF_FLOATS))
    assert engine.version == 2


async def test_changes_that_the_model_has_no_room_for_are_refused(engine: Engine) -> None:
    for name, position in (("model.norm.weight", 64), ("model.abnorm.weight", 0)):
        with pytest.raises(ModelMismatchError, match="norm"):
            await engine.update(WeightUpdate(version=1, changes={name: [one_change(position)]}, **OF_FLOATS))
    assert engine.version == 0
