"""The losses, masks and weights against reference_losses.py, on batches of another seed than the oracles', in float64.

Every case runs as one micro-batch and dealt into three: the answer must not depend on packing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks._oracle_vectors import (  # type: ignore[import-not-found]  # type: ignore[import-not-found]
    Case,  # type: ignore[import-not-found]
    Tokens,
    algorithms,
    cases,
    folder,
    judge,
    run_loss,
)
from benchmarks.oracle_vectors import ADAPTERS, summary  # type: ignore[import-not-found]
from services.trainer.losses import kl_per_token
from tests.unit.trainer import reference_losses as reference
from tests.unit.trainer.building import algorithm

sys.path.insert(
    0, str(Path(__file__).resolve().parents[3] / "benchmarks")
)  # its modules import each other by bare names


SEEDS = range(20_261_122, 20_261_126)
PPO = {"eps_clip": 0.2}
Reference = Callable[[reference.Batch], reference.Result]

LOSSES: dict[str, tuple[dict[str, object], Reference]] = {
    "m2po authors": (
        {"name": "m2po", "m2po_rule": "authors"},
        lambda b: reference.m2po_by_authors(b, 0.04, 0.3, 0.5),
    ),
    "tis token, normalised": (
        {"name": "tis", "importance_cap": 1.5, "importance_normalize": True},
        lambda b: reference.tis(b, "token", 0.0, 1.5, normalize=True),
    ),
    "tis sequence, normalised": (
        {"name": "tis", "importance_level": "sequence", "importance_cap": 2.0, "importance_normalize": True},
        lambda b: reference.tis(b, "sequence", 0.0, 2.0, normalize=True),
    ),
    "tis geometric, both bounds": (
        {"name": "tis", "importance_level": "sequence_mean", "importance_cap": 1.1, "importance_floor": 0.9},
        lambda b: reference.tis(b, "sequence_mean", 0.9, 1.1),
    ),
    "icepop": (
        {"name": "decoupled_ppo", "importance_cap": 1.5, "importance_floor": 0.7},
        lambda b: reference.masked_importance(b, "token", 0.7, 1.5),
    ),
    "mis sequence": (
        {"name": "decoupled_ppo", "importance_level": "sequence", "importance_cap": 1.5},
        lambda b: reference.masked_importance(b, "sequence", 0.0, 1.5),
    ),
    "ppo against proximal": (
        {"name": "decoupled_ppo", "importance_level": "none"},
        lambda b: reference.ppo(b, b.proximal),
    ),
    "cispo, both bounds": (
        {"name": "cispo", "importance_floor": 0.8, "importance_cap": 1.28},
        lambda b: reference.cispo(b, "token", 0.8, 1.28),
    ),
    "cispo sequence": (
        {"name": "cispo", "importance_level": "sequence", "importance_cap": 2.0},
        lambda b: reference.cispo(b, "sequence", 0.0, 2.0),
    ),
    "sapo sequence": (
        {"name": "sapo", "sapo_level": "sequence", "sapo_tau_positive": 0.7, "sapo_tau_negative": 1.3},
        lambda b: reference.sapo_of_sequences(b, 0.7, 1.3),
    ),
    "dppo": (
        {"name": "dppo", "probability_low": 0.03, "probability_high": 0.05, "behaviour_penalty": 0.02},
        lambda b: reference.probability_region(b, lambda c, a: c > 0.05 if a > 0 else c < -0.03, 0.02),
    ),
    "ipo": (
        {"name": "ipo", "probability_threshold": 0.04, "behaviour_penalty": 0.01},
        lambda b: reference.probability_region(b, lambda c, a: abs(c) > 0.04, 0.01),
    ),
}  # fmt: skip

REJECTIONS: dict[str, list[tuple[str, str, str, float, float]]] = {
    "token ratio": [("token", "ratio", "mean", 0.8, 1.25)],
    "token k2": [("token", "k2", "mean", 0.0, 0.02)],
    "token k3 and k3_reverse": [("token", "k3", "mean", 0.0, 0.03), ("token", "k3_reverse", "mean", 0.0, 0.02)],
    "sequence product": [("sequence", "ratio", "sum", 0.6, 1.6)],
    "sequence geometric mean": [("sequence", "ratio", "mean", 0.95, 1.05)],
    "sequence largest k3": [("sequence", "k3", "max", 0.0, 0.08)],
    "sequence and token": [("sequence", "k2", "mean", 0.0, 0.04), ("token", "ratio", "mean", 0.7, 1.4)],
}


def made(seed: int) -> Case:
    """Ragged sequences with gaps in the mask, a sequence of one trained token, log ratios of about a quarter."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(2, 9, size=7)
    count = int(lengths.sum())
    mask = (rng.random(count) < 0.8).astype(int)
    ends = lengths.cumsum()
    mask[ends - 1] = 1
    mask[: ends[0] - 1] = 0
    behaviour = -rng.exponential(1.0, size=count) - 0.05
    proximal = behaviour + rng.normal(0.0, 0.2, size=count)
    inputs = {
        "sequence_lengths": lengths.tolist(),
        "mask": mask.tolist(),
        "logprobs": (proximal + rng.normal(0.0, 0.2, size=count)).tolist(),
        "behaviour": behaviour.tolist(),
        "proximal": proximal.tolist(),
        "advantages": np.repeat(rng.normal(size=7), lengths).tolist(),
    }
    return Case(
        algorithm="own", name=str(seed), oracle="reference", function="", tolerance=1e-12, settings={}, inputs=inputs,
        outputs={},
    )  # fmt: skip


def batch_of(case: Case) -> reference.Batch:
    tokens = Tokens.of(case)
    return reference.Batch(
        *(tokens.input(name).numpy() for name in ("logprobs", "behaviour", "proximal", "advantages")),
        sequences=[np.flatnonzero(tokens.sequence.numpy() == i).tolist() for i in range(tokens.num_sequences)],
    )


def same(case: Case, settings: dict[str, object], expected: reference.Result) -> None:
    trained = Tokens.of(case).index.tolist()
    for parts in (1, 3):
        found = run_loss(case, algorithm(**settings), parts=parts)  # type: ignore[arg-type]
        assert found.loss == pytest.approx(expected[0], rel=1e-12, abs=1e-14)
        assert [found.gradient[t] for t in trained] == pytest.approx(expected[1].tolist(), rel=1e-11, abs=1e-14)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_its_formula(name: str, seed: int) -> None:
    settings, expected = LOSSES[name]
    case = made(seed)
    same(case, settings, expected(batch_of(case)))


@pytest.mark.parametrize("denominator", ["all", "kept"])
@pytest.mark.parametrize("name", REJECTIONS)
def test_rejected_tokens_are_as_if_untrained(name: str, denominator: str) -> None:
    criteria = REJECTIONS[name]
    rejection = [
        {"level": level, "criterion": estimate, "reduce": reduce, "upper": upper} | ({"lower": low} if low else {})
        for level, estimate, reduce, low, upper in criteria
    ]
    shared = {"rejection": rejection, "rejection_denominator": denominator}
    num_rejected = 0
    for seed in SEEDS:
        case = made(seed)
        left = reference.rejected(batch_of(case), criteria, denominator)
        num_rejected += left.alive.count(False)
        if not any(left.alive):
            continue
        same(case, {"name": "ppo_clip", **shared}, reference.ppo(left, left.behaviour))
        same(case, {"name": "cispo", "importance_level": "sequence_mean", "importance_cap": 1.2, **shared},
             reference.cispo(left, "sequence_mean", 0.0, 1.2))  # fmt: skip
        same(case, {"name": "m2po", "m2po_rule": "authors", **shared}, reference.m2po_by_authors(left, 0.04, 0.3, 0.5))
    assert num_rejected, "the batches must exercise the criterion"


def test_denominators_of_sequences_follow_the_mask() -> None:
    case = made(SEEDS[1])
    batch = batch_of(case)
    criteria = [("sequence", "k2", "mean", 0.0, 0.03), ("token", "ratio", "mean", 0.8, 1.25)]
    left = reference.rejected(batch, criteria, "kept")
    per_token = [reference.surrogate(np.exp(n - b), a, 0.8, 1.2)[0]
                 for n, b, a in zip(batch.new, batch.behaviour, batch.advantages, strict=True)]  # fmt: skip
    kept = [[t for t in s if left.alive[t]] for s in batch.sequences]
    alive = [s for s in kept if s]
    assert 0 < len(alive) < 7 and any(0 < len(k) < len(s) for k, s in zip(kept, batch.sequences, strict=True))
    by_kept = sum(np.mean([per_token[t] for t in s]) for s in alive) / len(alive)
    by_all = sum(sum(per_token[t] for t in k) / len(s) for k, s in zip(kept, batch.sequences, strict=True)) / 7
    rejection = [{"level": "sequence", "criterion": "k2", "upper": 0.03}, {"lower": 0.8, "upper": 1.25}]
    for denominator, expected in (("kept", by_kept), ("all", by_all)):
        config = algorithm("ppo_clip", loss_aggregation="sequence_mean", rejection=rejection,
                           rejection_denominator=denominator)  # fmt: skip
        assert run_loss(case, config).loss == pytest.approx(expected, rel=1e-12)
        assert run_loss(case, config, parts=3).loss == pytest.approx(expected, rel=1e-12)


def test_the_straight_through_estimator_has_the_value_of_k3_and_the_gradient_of_k2() -> None:
    rng = np.random.default_rng(SEEDS[0])
    reference_logprobs = torch.tensor(-rng.exponential(1.0, size=40))
    logprobs = (reference_logprobs + torch.tensor(rng.normal(0.0, 1.0, size=40))).requires_grad_()
    x = (logprobs - reference_logprobs).detach().numpy()
    found = kl_per_token(logprobs, reference_logprobs, "k3_straight_through")
    assert found.tolist() == pytest.approx((np.exp(-x) - 1 + x).tolist(), rel=1e-12, abs=1e-14)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert gradient.tolist() == pytest.approx(x.tolist(), rel=1e-12)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_straight_through"])
def test_a_clamped_estimate_is_bounded_and_has_no_gradient_beyond(estimator: str) -> None:
    """One token at l - ref = -20 has an estimate of e^20 by k3, and would take the whole update."""
    logprobs = torch.tensor([-20.0, -19.0, -0.5], dtype=torch.float64, requires_grad=True)
    found = kl_per_token(logprobs, torch.tensor([0.0, 0.0, 0.0], dtype=torch.float64), estimator, 10.0)
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    assert found.abs().tolist()[:2] == [10.0, 10.0] and found.abs()[2] < 10.0
    assert gradient.tolist()[:2] == [0.0, 0.0] and gradient[2] != 0.0


def test_the_temperature_of_sapo_is_exact() -> None:
    """1.05 as float32 is 1.0499999523."""
    case = made(SEEDS[0])
    batch = batch_of(case)
    tau = np.where(batch.advantages > 0, 1.0, 1.05)
    ratio = np.exp(batch.new - batch.behaviour)
    expected = float((-4 / tau / (1 + np.exp(-tau * (ratio - 1))) * batch.advantages).mean())
    assert run_loss(case, algorithm("sapo")).loss == pytest.approx(expected, rel=1e-14)


# -- Losses and advantages answer as published RL code does, on data/oracle_vectors, or differ for a stated reason.


sys.path.insert(
    0, str(Path(__file__).resolve().parents[3] / "benchmarks")
)  # its modules import each other by bare names


@pytest.mark.needs("oracle vectors")
@pytest.mark.parametrize("algorithm", sorted(ADAPTERS))
def test_every_case_agrees_or_differs_by_design(algorithm: str, record_property: Callable[[str, object], None]) -> None:
    root = folder()
    assert root is not None
    verdicts = [judge(case, ADAPTERS[algorithm](case)) for case in cases(root, algorithm)]
    facts = summary(verdicts)
    record_property("oracle_vectors", facts)
    without_reason = [v for v in verdicts if not v.agrees and v.by_design is None]
    assert verdicts and [(v.case.title, v.output, v.difference) for v in without_reason] == []
    assert [v.case.title for v in verdicts if v.agrees and v.by_design] == [], "they are said to differ"


@pytest.mark.needs("oracle vectors")
def test_every_file_has_an_adapter() -> None:
    root = folder()
    assert root is not None and set(algorithms(root)) == set(ADAPTERS)
