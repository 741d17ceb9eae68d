"""What the torch engine draws: noise, samples, and which tokens could be drawn."""

from __future__ import annotations

import numpy as np
import torch

from services.common.kept_tokens import pack, unpack
from services.inference.engine.torch.slots import (
    Drawn,
    SamplingRows,
    sample,
    sample_plain,
    uniform_noise,
)


def test_noise_is_uniform_and_independent_over_seeds_and_indices() -> None:
    seeds, indices = np.meshgrid(np.arange(300, dtype=np.uint64), np.arange(300), indexing="ij")
    noise = uniform_noise(seeds.ravel(), indices.ravel()).reshape(300, 300)
    assert 0 <= noise.min() <= noise.max() < 1
    counts, _ = np.histogram(noise, bins=50)
    assert np.abs(counts / 1800 - 1).max() < 0.15
    for a, b in ((noise[:-1], noise[1:]), (noise[:, :-1], noise[:, 1:]), (noise[:-1, 1:], noise[1:, :-1])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.02
    assert len(np.unique(noise)) == noise.size


def rows_of(count: int, **columns: object) -> SamplingRows:
    settings = {
        "temperature": np.ones(count, np.float32),
        "top_p": np.ones(count, np.float32),
        "top_k": np.zeros(count, np.int64),
        "min_p": np.zeros(count, np.float32),
        "record": np.zeros(count, bool),
        "suppress_stop": np.zeros(count, bool),
        "stop_ids": np.full((count, 1), -1),
        "uniform": (np.arange(count) + 0.5) / count,
    }
    return SamplingRows(**{**settings, **columns})  # type: ignore[arg-type]


def test_sampling_follows_the_distribution() -> None:
    torch.manual_seed(0)
    logits = torch.randn(40) * 2
    count = 40_000
    drawn = sample(logits.repeat(count, 1), rows_of(count))
    tokens, logprobs = drawn.tokens, drawn.logprobs
    expected = logits.double().softmax(-1).numpy()
    # Evenly spaced uniforms: each token's share is within one in `count` of its probability.
    assert np.abs(np.bincount(tokens, minlength=40) / count - expected).max() <= 1.01 / count
    assert np.abs(logprobs - np.log(expected)[tokens]).max() < 1e-5


def test_a_plain_draw_is_the_draw_of_rows_without_settings() -> None:
    torch.manual_seed(1)
    logits = torch.randn(64, 40) * 2
    rows = rows_of(64)
    shaped, plain = sample(logits.clone(), rows), sample_plain(logits.clone(), rows.uniform)
    assert np.array_equal(plain.tokens, shaped.tokens)
    assert np.array_equal(plain.logprobs, shaped.logprobs)
    assert plain.kept == {}


def test_a_token_of_probability_zero_is_never_drawn() -> None:
    logits = torch.full((3, 6), -torch.inf)
    logits[:, 2] = 1.0
    logits[:, 4] = 1.0
    edge = np.array([0.0, 0.5, 1 - 2.0**-48])
    drawn = sample(logits, rows_of(3, uniform=edge))
    assert drawn.tokens.tolist() == [2, 4, 4]
    assert np.allclose(drawn.logprobs, np.log(0.5))


def packed_at(drawn: Drawn, row: int) -> bytes:
    return pack([drawn.kept[row]], 1) if row in drawn.kept else b""


def test_rows_with_different_settings_do_not_disturb_each_other() -> None:
    torch.manual_seed(1)
    logits = torch.randn(7, 30)
    mixed = rows_of(
        7,
        temperature=np.array([1, 0, 0.5, 1, 1, 1, 1], np.float32),
        top_k=np.array([0, 0, 0, 3, 0, 0, 0]),
        top_p=np.array([1, 1, 1, 1, 0.5, 1, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0, 0.2, 0], np.float32),
        suppress_stop=np.array([0, 0, 0, 0, 0, 0, 1], bool),
        stop_ids=np.full((7, 1), 4),
        uniform=np.full(7, 0.37),
        record=np.ones(7, bool),
        forced=np.array([-1, -1, 7, -1, 11, -1, -1]),
    )
    together = sample(logits.clone(), mixed)
    tokens = together.tokens
    for i in range(7):
        columns = {name: getattr(mixed, name)[i : i + 1] for name in SamplingRows.__dataclass_fields__}
        alone = sample(logits[i : i + 1].clone(), SamplingRows(**columns))
        assert alone.tokens[0] == tokens[i]
        assert abs(alone.logprobs[0] - together.logprobs[i]) < 1e-6
        assert packed_at(alone, 0) == packed_at(together, i)
    assert tokens[1] == int(logits[1].argmax())
    assert (tokens[2], tokens[4]) == (7, 11)
    assert set(together.kept) == {3, 4, 5, 6}, (
        "rows that draw from the whole vocabulary, or greedily, record no kept tokens"
    )


def test_what_is_recorded_is_the_set_that_the_log_probability_is_normalised_over() -> None:
    torch.manual_seed(2)
    logits = 2 * torch.randn(64, 300)
    rng = np.random.default_rng(0)
    rows = rows_of(
        64,
        temperature=rng.choice([0.6, 1.0, 1.4], 64).astype(np.float32),
        top_p=rng.choice([1, 0.3, 0.9, 0.999], 64).astype(np.float32),
        top_k=rng.choice([0, 1, 7, 290, 999], 64),
        min_p=rng.choice([0, 1e-4, 0.1], 64).astype(np.float32),
        suppress_stop=rng.random(64) < 0.5,
        stop_ids=rng.integers(-1, 300, (64, 3)),
        record=np.ones(64, bool),
        forced=np.where(rng.random(64) < 0.2, 150, -1),
    )
    drawn = sample(logits.clone(), rows)
    sizes = set()
    for i in range(64):
        token_ids = drawn.tokens[i : i + 1].astype(np.int32)
        sets = unpack(pack([drawn.kept[i]] if i in drawn.kept else [], 1), token_ids)
        kept = set(range(300)) - set(sets.ids.tolist()) if sets.left_out[0] else set(sets.ids.tolist())
        log_p = (logits[i].double() / float(rows.temperature[i])).numpy()
        exact = log_p[drawn.tokens[i]] - np.log(np.exp(log_p[sorted(kept)]).sum())
        assert abs(exact - drawn.logprobs[i]) < 1e-5
        if rows.suppress_stop[i]:
            assert not kept & set(rows.stop_ids[i].tolist()) - {150}
        sizes.add(len(kept))
    assert len(sizes) > 10, "sets of many sizes are compared"
