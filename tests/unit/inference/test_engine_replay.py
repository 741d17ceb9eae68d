"""The replay engine emits exactly its given tokens; their log-probabilities are those of the named version."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from services.common.errors import InvalidRequestError
from services.inference.engine.base import FinishReason
from services.inference.engine.torch.engine import ReplayEngine
from tests.random_models import (
    TOLERANCE,
    VOCAB,
    build_model,
    kept_sets,
    make_prompt,
    make_request,
    max_gap,
    reference_logprobs,
)
from tests.unit.inference.conftest import Launch

STOP = 300


def words(length: int, seed: int = 0) -> list[int]:
    """Tokens to generate, with one stop token, at the end."""
    return [token % STOP for token in make_prompt(length - 1, seed + 50)] + [STOP]


@pytest.mark.parametrize("kind", ["qwen3", "qwen2", "llama"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_forced_tokens_have_the_logprobs_of_a_forward_pass(launch: Launch, kind: str, temperature: float) -> None:
    model = build_model(kind)
    engine = await launch(model, ReplayEngine)
    prompts = [make_prompt(length, seed) for seed, length in enumerate([3, 50, 20, 33, 1])]
    said = [words(10 + 7 * seed, seed) for seed in range(len(prompts))]
    generations = await asyncio.gather(
        *(
            engine.generate(make_request(p, stop=(STOP,), forced=s, temperature=temperature))
            for p, s in zip(prompts, said, strict=True)
        )
    )
    for prompt, text, generation in zip(prompts, said, generations, strict=True):
        assert generation.token_ids == text
        assert generation.finish_reason is FinishReason.STOP
        assert max_gap(model, prompt, generation, generation.segments[0], temperature) <= TOLERANCE


@pytest.mark.parametrize(("top_k", "top_p"), [(80, 1.0), (0, 0.8), (150, 0.6)])
async def test_a_token_outside_the_kept_set_is_kept_beside_it(launch: Launch, top_k: int, top_p: float) -> None:
    model = build_model("qwen3")
    engine = await launch(model, ReplayEngine)
    prompt, said = make_prompt(12), words(60)
    generation = await engine.generate(
        make_request(prompt, stop=(STOP,), forced=said, temperature=1.3, top_k=top_k, top_p=top_p)
    )
    reference = reference_logprobs(model, prompt + said, len(prompt), temperature=1.3).numpy()
    outside = 0
    told = kept_sets(generation)
    for row, token, logprob, drawable in zip(reference, said, generation.segments[0].logprobs, told, strict=True):
        order = np.argsort(-row)[: top_k or VOCAB]
        p = np.exp(row[order].astype(np.float64))
        kept = set(order[: int(np.searchsorted(np.cumsum(p / p.sum()), top_p)) + 1].tolist())
        outside += token not in kept
        assert drawable == kept | {token}
        mass = np.exp(row[sorted(kept | {token})].astype(np.float64)).sum()
        assert abs(row[token] - np.log(mass) - logprob) <= TOLERANCE
    assert 0 < outside < len(said), "tokens of both kinds are compared"


@pytest.mark.parametrize(
    ("said", "sampling", "expected", "reason"),
    [
        ([1, 2, STOP, 4], {}, [1, 2, STOP], FinishReason.STOP),
        ([1, 2, 3], {}, [1, 2, 3], FinishReason.LENGTH),
        ([1, 2, 3, STOP], {"max_new_tokens": 2}, [1, 2], FinishReason.LENGTH),
        ([1, 2, 3, STOP], {"max_new_tokens": 4, "min_new_tokens": 3}, [1, 2, 3, STOP], FinishReason.STOP),
    ],
)
async def test_stop_tokens_budget_and_the_last_word_end_it(
    launch: Launch, said: list[int], sampling: dict[str, Any], expected: list[int], reason: FinishReason
) -> None:
    engine = await launch(build_model("qwen3"), ReplayEngine)
    generation = await engine.generate(make_request(make_prompt(9), stop=(STOP,), forced=said, **sampling))
    assert (generation.token_ids, generation.finish_reason) == (expected, reason)


@pytest.mark.parametrize(
    ("forced", "sampling", "complaint"),
    [
        (None, {}, "samples none"),
        ([], {}, "samples none"),
        ([VOCAB], {}, "outside"),
        ([1, STOP], {"min_new_tokens": 2, "max_new_tokens": 9}, "before min_new_tokens"),
    ],
)
async def test_words_that_cannot_be_said_are_refused(
    launch: Launch, forced: list[int] | None, sampling: dict[str, Any], complaint: str
) -> None:
    engine = await launch(build_model("qwen3"), ReplayEngine)
    with pytest.raises(InvalidRequestError, match=complaint):
        await engine.generate(make_request([1, 2], stop=(STOP,), forced=forced, **sampling))


async def test_an_engine_that_samples_refuses_to_be_told_what_to_say(launch: Launch) -> None:
    engine = await launch(build_model("qwen3"))
    with pytest.raises(InvalidRequestError, match="engine: forced"):
        await engine.generate(make_request([1, 2], forced=[3]))
