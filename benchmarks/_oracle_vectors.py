"""Cases of published RL code, and how far our answers are from theirs: used by oracle_vectors.py and by the tests.

A file of ROLLMILL_DATA_ROOT/oracle_vectors is one algorithm. An adapter runs one of its cases through the real
functions of the trainer and gives an ``Answer``. ``judge`` compares both answers:

    agrees      every output is within the case's tolerance of the oracle's
    by design   different, and the adapter gives the reason; agreement in spite of a reason is a fault of the adapter
    differs     neither: a defect
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import TypeAdapter

from services.common.config.algorithm import AlgorithmConfig, ImportanceSettings, LossConfig, Tis
from services.common.config.training import OverlongPenaltyConfig
from services.common.records import MinibatchTotals, Segment, StopReason, TokenSequence, TrainingSequence
from services.orchestrator.buffer.buffer import overlong_penalty as penalty_of
from services.orchestrator.buffer.buffer import statistics
from services.trainer.advantages import Moments, at_last_token, discounted_sums, gae, normalize, sequence_advantages
from services.trainer.losses import (
    TokenBatch,
    aggregate,
    algorithm_of,
    importance_weights,
    kl_per_token,
    truncated,
    value_loss,
    weight_sum,
)
from services.trainer.model.attention import Documents
from services.trainer.model.logprobs import Targets
from services.trainer.model.micro_batches import MicroBatch, MinibatchContext, minibatch_context
from services.trainer.ranks import Ranks
from services.trainer.step import with_teacher

Number = float | int | None
Values = Number | Sequence[Number]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One case of an oracle. ``inputs`` and ``outputs`` are flat lists over tokens or sequences, or single numbers."""

    algorithm: str
    name: str
    oracle: str
    function: str
    tolerance: float
    settings: Mapping[str, Any]  # the oracle's, in its own words
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]

    @property
    def title(self) -> str:
        return f"{self.algorithm}: {self.oracle}: {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Our numbers under the oracle's names. None in place of one element leaves that element out of the comparison."""

    outputs: Mapping[str, Values]
    by_design: str | None = None  # why another answer is ours, where it is


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    case: Case
    difference: float  # largest |ours - theirs| / max(1, |theirs|)
    output: str  # of which output
    by_design: str | None = None

    @property
    def agrees(self) -> bool:
        return self.difference <= self.case.tolerance


Adapter = Callable[[Case], Answer]


def folder() -> Path | None:
    """Where the vectors are; None where ROLLMILL_DATA_ROOT has none."""
    found = Path(os.environ.get("ROLLMILL_DATA_ROOT") or "/none") / "oracle_vectors"
    return found if found.is_dir() else None


def algorithms(root: Path) -> list[str]:
    return sorted(file.stem for file in root.glob("*.json"))


def cases(root: Path, algorithm: str) -> list[Case]:
    tree = json.loads((root / f"{algorithm}.json").read_text())
    if tree["format"] != 1:
        raise ValueError(f"{algorithm}.json has format {tree['format']}; this script reads 1")
    return [
        Case(
            algorithm=algorithm,
            name=case["name"],
            oracle=case["oracle"],
            function=case["function"],
            tolerance=case["tolerance"],
            settings=case["hyperparameters"],
            inputs=case["inputs"],
            outputs=case["outputs"],
        )
        for case in tree["cases"]
    ]


def judge(case: Case, answer: Answer) -> Verdict:
    """The largest difference over the outputs that the answer names.

    Raises:
        ValueError: the answer has no name, a name that the oracle lacks, or another number of values.
    """
    if not answer.outputs:
        raise ValueError(f"{case.title}: no values to compare")
    worst, where = 0.0, ""
    for name, ours in answer.outputs.items():
        difference = _difference(case, name, ours)
        if difference > worst or not where:
            worst, where = difference, name
    return Verdict(case=case, difference=worst, output=where, by_design=answer.by_design)


def _difference(case: Case, name: str, ours: Values) -> float:
    theirs = case.outputs
    for part in name.split("."):  # counts.clipped_tokens
        theirs = theirs[part]
    mine = list(ours) if isinstance(ours, Sequence) else [ours]
    expected = list(theirs) if isinstance(theirs, Sequence) else [theirs]
    if len(mine) != len(expected):
        raise ValueError(f"{case.title}: {name} has {len(mine)} values, the oracle {len(expected)}")
    pairs = [(m, e) for m, e in zip(mine, expected, strict=True) if m is not None and e is not None]
    differences = [abs(m - e) / max(1.0, abs(e)) for m, e in pairs]
    return max(differences, default=0.0) if all(map(math.isfinite, differences)) else math.inf


# --- Runs a policy loss of the trainer on the tokens of an oracle's case, as a training step does on a minibatch.


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOnCase:
    """Per-token lists have an entry for every token of the case, 0 for an untrained one."""

    loss: float
    gradient: list[float]
    per_token_loss: list[float]
    kept: list[int]
    counts: dict[str, int]
    context: MinibatchContext


@dataclass(frozen=True, slots=True)
class Tokens:
    """The trained tokens of a case, float64; sequences without one are left out, as no step is given such a sequence."""

    case: Case
    index: torch.Tensor  # [num_trained] position of each among all tokens of the case
    sequence: torch.Tensor  # [num_trained] int64 in [0, num_sequences)

    @classmethod
    def of(cls, case: Case) -> Tokens:
        lengths = np.array(case.inputs["sequence_lengths"])
        index = np.flatnonzero(np.array(case.inputs["mask"]))
        _, sequence = np.unique(np.repeat(np.arange(len(lengths)), lengths)[index], return_inverse=True)
        return cls(case, torch.as_tensor(index), torch.as_tensor(sequence))

    @property
    def num_sequences(self) -> int:
        return int(self.sequence[-1]) + 1

    def input(self, name: str) -> torch.Tensor:
        """[num_trained]; zeros where the case has no such input."""
        values = self.case.inputs.get(name, [0.0] * len(self.case.inputs["mask"]))
        return torch.tensor(values, dtype=torch.float64)[self.index]

    def spread(self, values: torch.Tensor) -> list[float]:
        """Back to all tokens of the case, zeros on those that are not trained."""
        full = torch.zeros(len(self.case.inputs["mask"]), dtype=torch.float64)
        full[self.index] = values.detach().double()
        return full.tolist()


def run_loss(case: Case, config: AlgorithmConfig, *, parts: int = 1) -> LossOnCase:
    """``parts``: micro-batches into which the sequences are dealt; the answer must not depend on ``parts``."""
    tokens, algorithm = Tokens.of(case), algorithm_of(config)
    logprobs = tokens.input("logprobs").requires_grad_()
    proximal = tokens.input("proximal")
    chosen = [torch.nonzero(tokens.sequence % parts == part).squeeze(1) for part in range(parts)]
    batches = [with_teacher(_micro_batch(tokens, own, config), logprobs.detach()[own], config) for own in chosen]
    context = minibatch_context(
        algorithm,
        config,
        batches,
        MinibatchTotals(num_sequences=tokens.num_sequences, num_trained_tokens=len(tokens.index)),
        Ranks.single(),
        current=[logprobs.detach()[own] for own in chosen],
        proximal=[proximal[own] for own in chosen],
    )
    per_token, kept = torch.zeros_like(proximal), torch.zeros_like(proximal)
    counts: dict[str, int] = {}
    total = torch.zeros((), dtype=torch.float64)
    for i, (own, batch) in enumerate(zip(chosen, batches, strict=True)):
        given = context.tokens(i, batch, logprobs[own], proximal[own])
        found = algorithm.loss(given, config)
        axes = (batch.sequence_index, batch.num_sequences)
        share = aggregate(found.per_token, given.mask, *axes, context.totals, config, counted=context.counted[i])
        total = total + share
        per_token[own], kept[own] = found.per_token.detach(), given.mask.double()
        for name, count in found.counts.items():
            counts[name] = counts.get(name, 0) + int(count)
    (gradient,) = torch.autograd.grad(total, logprobs)
    return LossOnCase(
        loss=total.item(),
        gradient=tokens.spread(gradient),
        per_token_loss=tokens.spread(per_token),
        kept=[int(k) for k in tokens.spread(kept)],
        counts=counts,
        context=context,
    )


def without(values: Sequence[float], left_out: Sequence[int]) -> list[float | None]:
    """The values, None at the positions that are left out of a comparison."""
    return [None if i in set(left_out) else value for i, value in enumerate(values)]


def _micro_batch(tokens: Tokens, own: torch.Tensor, config: AlgorithmConfig) -> MicroBatch:
    count = len(own)
    _, sequence = torch.unique(tokens.sequence[own], return_inverse=True)
    return MicroBatch(
        token_ids=torch.zeros(count, dtype=torch.int64),
        position_ids=torch.zeros(count, dtype=torch.int64),
        documents=Documents.from_offsets(np.array([0, count])),
        targets=Targets(torch.arange(count), torch.zeros(count, dtype=torch.int64)),
        behaviour=tokens.input("behaviour")[own],
        advantages=tokens.input("advantages")[own],
        weight_versions=torch.zeros(count, dtype=torch.int64),
        mixed_cache=torch.zeros(count, dtype=torch.bool),
        sequence_index=sequence,
        num_sequences=int(sequence.max()) + 1 if count else 0,
        num_given_tokens=count,
        teacher=None if config.distillation is None else tokens.input("reference")[own],
    )


# --- Adapters of the oracle files that are losses: from the oracle's settings to a section ``algorithm``, and back to its
# outputs.


_SECTION: TypeAdapter[Any] = TypeAdapter(LossConfig)
NO_CAP = 1e9
AGGREGATIONS: dict[str, dict[str, Any]] = {  # the oracles' names -> ours
    "token_mean": {"loss_aggregation": "token_mean"},
    "token-mean": {"loss_aggregation": "token_mean"},
    "sum over trained tokens / trained tokens": {"loss_aggregation": "token_mean"},
    "sequence_mean": {"loss_aggregation": "sequence_mean"},
    "seq-mean-token-mean": {"loss_aggregation": "sequence_mean"},
    "seq-mean-token-sum-norm": {"loss_aggregation": "sum"},
    "seq-mean-token-sum": {"loss_aggregation": "constant", "constant_denominator": 1},
}


def section(case: Case, name: str, **settings: Any) -> AlgorithmConfig:
    """The section of a case: its aggregation and ``settings``; a null is left out."""
    aggregation = AGGREGATIONS[case.settings.get("aggregation") or case.settings.get("mode") or "token_mean"]
    given = {key: value for key, value in settings.items() if value is not None}
    found: AlgorithmConfig = _SECTION.validate_python({"name": name, **aggregation, **given})
    return found


def clip(case: Case) -> dict[str, Any]:
    return {key: case.settings.get(key) for key in ("eps_clip", "eps_clip_higher", "c_clip")}


def compared(case: Case, found: LossOnCase, counts: Mapping[str, str] | None = None, **more: Values) -> Answer:
    """Loss, gradient and, if the oracle has one, the loss of each token; ``counts``: its name -> ours."""
    outputs: dict[str, Values] = {"loss": found.loss, "gradient": found.gradient}
    if "per_token_loss" in case.outputs:
        outputs["per_token_loss"] = found.per_token_loss
    for theirs, ours in (counts or {}).items():
        if theirs in case.outputs.get("counts", {}):
            outputs[f"counts.{theirs}"] = found.counts[ours]
    return Answer(outputs={**outputs, **more})


def aggregation(case: Case) -> Answer:
    if "per_token_loss" not in case.inputs:
        return compared(case, run_loss(case, section(case, "ppo_clip", **clip(case))))
    tokens = Tokens.of(case)
    values = tokens.input("per_token_loss").requires_grad_()
    loss = aggregate(
        values,
        torch.ones_like(values, dtype=torch.bool),
        tokens.sequence,
        tokens.num_sequences,
        MinibatchTotals(num_sequences=tokens.num_sequences, num_trained_tokens=len(values)),
        section(case, "reinforce", constant_denominator=case.settings["scale_factor"]),
    )
    (gradient,) = torch.autograd.grad(loss, values)
    return Answer(outputs={"loss": loss.item(), "gradient_wrt_per_token_loss": tokens.spread(gradient)})


def cispo(case: Case) -> Answer:
    bounds = {"importance_cap": case.settings["weight_upper"], "importance_floor": case.settings["weight_lower"]}
    config = section(case, "cispo", **bounds)
    return compared(case, run_loss(case, config), {"truncated_tokens": "truncated_tokens"})


def decoupled_ppo(case: Case) -> Answer:
    config = section(case, "decoupled_ppo", **clip(case), importance_cap=case.settings["importance_cap"])
    found = run_loss(case, config)
    answer = compared(case, found, {"dropped_tokens": "dropped_tokens"})
    if case.settings["denominator"] == "kept tokens" and found.counts["dropped_tokens"]:
        return Answer(
            outputs=answer.outputs, by_design="RLinf divides by the kept tokens, decoupled_ppo by all trained"
        )
    return answer


def gspo(case: Case) -> Answer:
    config = section(case, "gspo", eps_clip=case.settings["eps_clip"], eps_clip_higher=case.settings["eps_clip_higher"])
    answer = compared(case, run_loss(case, config), {"clipped_tokens": "clipped_tokens"})
    if case.oracle == "verl" and case.name.startswith("varying_advantages"):
        reason = "advantages that vary within a sequence: verl clips each token by its own, here and in AReaL their mean counts"
        return Answer(outputs=answer.outputs, by_design=reason)
    return answer


def kl(case: Case) -> Answer:
    tokens = Tokens.of(case)
    logprobs = tokens.input("logprobs").requires_grad_()
    _, bound = case.settings["clamp_value"] or (None, None)
    values = kl_per_token(logprobs, tokens.input("reference"), case.settings["estimator"], bound)
    loss = values.mean()
    (gradient,) = torch.autograd.grad(loss, logprobs)
    return Answer(
        outputs={
            "loss": loss.item(),
            "gradient": tokens.spread(gradient),
            "per_token_loss": tokens.spread(values),
        }
    )


def m2po(case: Case) -> Answer:
    return _m2po(case, section(case, "m2po", m2po_threshold=case.settings["m2po_threshold"]))


def m2po_authors(case: Case) -> Answer:
    settings = {
        "m2po_threshold": case.settings["budget"],
        "m2po_floor_low": case.settings["floor_low"] or 0.0,
        "m2po_floor_high": case.settings["floor_high"] or 0.0,
    }
    return _m2po(case, section(case, "m2po", m2po_rule="authors", **settings))


def _m2po(case: Case, config: AlgorithmConfig) -> Answer:
    """The tokens that define the bound are left out: the oracle's rounding decides on which side of the clip they fall."""
    found = run_loss(case, config)
    assert found.context.region is not None
    return Answer(
        outputs={
            "loss": found.loss,
            "gradient": without(found.gradient, case.outputs["boundary_tokens"]),
            "per_token_loss": found.per_token_loss,
            "eps_low": float(found.context.region.eps_low),
            "eps_high": float(found.context.region.eps_high),
            "mean_second_moment": float(found.context.region.mean_second_moment),
        }
    )


def m2po_mask(case: Case) -> Answer:
    config = section(
        case,
        "m2po_mask",
        **clip(case),
        m2po_threshold=case.settings["m2po_threshold"],
        importance_cap=case.settings["importance_cap"],
    )
    found = run_loss(case, config)
    return compared(case, found, kept_mask=found.kept)


def ppo_clip(case: Case) -> Answer:
    counts = {"clipped_tokens": "clipped_tokens", "dual_clipped_tokens": "dual_clipped_tokens"}
    return compared(case, run_loss(case, section(case, "ppo_clip", **clip(case))), counts)


def probability_mask(case: Case) -> Answer:
    settings = {"behaviour_penalty": case.settings["kl_tau"]}
    if case.settings["kind"] == "ipo_loss_fn":
        config = section(case, "ipo", probability_threshold=case.settings["ipo_threshold"], **settings)
    else:
        bounds = {
            "probability_low": case.settings["dppo_mask_low"],
            "probability_high": case.settings["dppo_mask_high"],
        }
        config = section(case, "dppo", **bounds, **settings)
    return compared(case, run_loss(case, config), {"masked_tokens": "ended_tokens"})


def reinforce(case: Case) -> Answer:
    """With importance weights of the policy this is ``cispo``; the weights are compared too."""
    level = case.settings.get("weight_level")
    if level is None:
        return compared(case, run_loss(case, section(case, "reinforce")))
    config = section(case, "cispo", importance_level=level, importance_cap=case.settings["importance_cap"])
    return compared(case, run_loss(case, config), weights=_weights(case, config, "logprobs"))


def _weights(case: Case, config: AlgorithmConfig, new: str) -> list[float]:
    """The truncated importance weights of all tokens of the case."""
    assert isinstance(config, ImportanceSettings)
    tokens = Tokens.of(case)
    given = TokenBatch(
        logprobs=tokens.input("logprobs"),
        behaviour=tokens.input("behaviour"),
        advantages=tokens.input("advantages"),
        mask=torch.ones(len(tokens.index), dtype=torch.bool),
        sequence_index=tokens.sequence,
        num_sequences=tokens.num_sequences,
    )
    level = config.importance_level
    weights = truncated(importance_weights(tokens.input(new), given.behaviour, given, level), config)
    if isinstance(config, Tis) and config.importance_normalize:
        total, count = weight_sum(weights, given, level)
        weights = weights / (total / count)
    return tokens.spread(weights)


def rejection(case: Case) -> Answer:
    """verl has no importance weight there and divides by the kept tokens; AReaL weighs and divides by all trained
    tokens."""
    is_verl = case.oracle == "verl"
    level = "none" if is_verl else "sequence_mean" if _is_sequence_ratio(case) else "token"
    config = section(
        case,
        "decoupled_ppo",
        **clip(case),
        importance_level=level,
        importance_cap=None if is_verl else NO_CAP,
        rejection=_verl_criteria(case) if is_verl else [_areal_criterion(case)],
        rejection_denominator="kept" if is_verl else "all",
    )
    found = run_loss(case, config)
    kept: dict[str, Values] = {
        "kept_mask": found.kept,
        "counts.rejected_tokens": sum(case.inputs["mask"]) - sum(found.kept),
    }
    return compared(case, found, **kept) if "loss" in case.outputs else Answer(outputs=kept)


def _verl_criteria(case: Case) -> list[dict[str, Any]]:
    """k1 is behaviour - proximal: its bounds are those of our ratio, turned round."""
    found = []
    names, limits = case.settings["criterion"].split(","), case.settings["threshold"].split(",")
    for name, limit in zip(names, limits, strict=True):
        *level, estimator = name.split("_")
        criterion: dict[str, Any] = (
            {"level": "token"} if level == ["token"] else {"level": "sequence", "reduce": level[1]}
        )
        if estimator == "k1":
            lower, upper = map(float, limit.split("_"))
            found.append({**criterion, "criterion": "ratio", "lower": 1 / upper, "upper": 1 / lower})
        else:
            found.append({**criterion, "criterion": estimator, "upper": float(limit)})
    return found


def _areal_criterion(case: Case) -> dict[str, Any]:
    names = {"ratio": "ratio", "kl_k2": "k2", "kl_k3": "k3_reverse"}
    found = {
        "level": case.settings["level"],
        "criterion": names[case.settings["metric"]],
        "reduce": case.settings["agg"],
    }
    bounds = {key: case.settings[key] for key in ("lower", "upper")}
    return {key: value for key, value in {**found, **bounds}.items() if value is not None}


def _is_sequence_ratio(case: Case) -> bool:
    return case.settings["metric"] == "ratio" and case.settings["level"] == "sequence"


def sapo(case: Case) -> Answer:
    config = section(
        case,
        "sapo",
        sapo_tau_positive=case.settings["tau_positive"],
        sapo_tau_negative=case.settings["tau_negative"],
        sapo_level=case.settings["level"],
    )
    return compared(case, run_loss(case, config))


def tis(case: Case) -> Answer:
    levels = {"product over trained tokens": "sequence", "geometric mean over trained tokens": "sequence_mean"}
    config = section(
        case,
        "tis",
        **clip(case),
        importance_level=levels[case.settings["sequence_ratio"]] if "sequence_ratio" in case.settings else "token",
        importance_cap=case.settings["importance_cap"],
        importance_floor=case.settings.get("importance_floor"),
        importance_normalize=case.settings.get("batch_normalize"),
    )
    counts = {"truncated_tokens": "truncated_tokens", "clipped_tokens": "clipped_tokens"}
    return compared(case, run_loss(case, config), counts, weights=_weights(case, config, "proximal"))


LOSS_ADAPTERS: dict[str, Adapter] = {
    "aggregation": aggregation,
    "cispo": cispo,
    "decoupled_ppo": decoupled_ppo,
    "dual_clip": ppo_clip,
    "gspo": gspo,
    "kl": kl,
    "m2po": m2po,
    "m2po_authors": m2po_authors,
    "m2po_mask": m2po_mask,
    "ppo_clip": ppo_clip,
    "probability_mask": probability_mask,
    "reinforce": reinforce,
    "rejection_sequence": rejection,
    "rejection_token": rejection,
    "sapo": sapo,
    "tis_sequence": tis,
    "tis_token": tis,
}


# --- Adapters of the oracle files that are advantages, returns, values and a teacher's say.


VERL_EPS = 1e-8  # verl has it under the root, added to the variance
SINGLETON = "a group of one: verl takes its reward for its advantage, here it is 0"
EPS_UNDER_THE_ROOT = (
    "verl adds 1e-8 to the variance, here eps is added to the deviation: it shows where rewards hardly spread"
)
UNCAPPED = "AReaL's penalty goes on growing beyond max_tokens, here it ends at factor, as in DAPO's paper"
FALLEN = "prime-rl drops a token when its probability fell against the teacher's advantage, dppo goes by the advantage's sign"


def stamped(case: Case) -> list[TrainingSequence]:
    """One sequence per reward, with the statistics of its whole group, as the orchestrator stamps them."""
    rewards, groups = case.inputs["rewards"], case.inputs["groups"]
    result = []
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        siblings = [r for r, g in zip(rewards, groups, strict=True) if g == group]
        mean, std = statistics(siblings)
        segments = (Segment.environment([0]), Segment.policy([0], [0.0], 0))
        result.append(
            TrainingSequence(
                sequence_id=f"{group}/{i}/0",
                sequence=TokenSequence(policy="p", segments=segments, reward=reward, stop_reason=StopReason.STOP),
                group_mean=mean, group_std=std, group_size=len(siblings), staleness=0, minibatch=0, position=i,
            )
        )  # fmt: skip
    return result


def differing(case: Case, outputs: dict[str, Values], left_out: Sequence[int], reason: str) -> Answer:
    """The reason holds only if all elements but ``left_out`` agree."""
    rest = {name: without(v, left_out) if isinstance(v, Sequence) else v for name, v in outputs.items()}
    alike = judge(case, Answer(outputs=rest)).agrees
    return Answer(
        outputs=outputs, by_design=reason if alike and not judge(case, Answer(outputs=outputs)).agrees else None
    )


def of_groups(case: Case, advantage: str, eps: float = 1e-5) -> Answer:
    config = AlgorithmConfig(advantage=advantage, advantage_eps=eps)  # type: ignore[arg-type]
    sequences = stamped(case)
    found = sequence_advantages(sequences, config).tolist()
    alone = [i for i, s in enumerate(sequences) if s.group_size == 1]
    return differing(case, {"advantages": found}, alone, SINGLETON)


def grpo_advantage(case: Case) -> Answer:
    return of_groups(case, "grpo", case.settings["eps"])


def dr_grpo_advantage(case: Case) -> Answer:
    return of_groups(case, "dr_grpo")


def rloo_advantage(case: Case) -> Answer:
    return of_groups(case, "rloo")


def whitening(kind: Literal["population", "sample"], eps: float) -> AlgorithmConfig:
    return AlgorithmConfig(
        advantage="reinforce", batch_normalize_advantages=True, normalize_deviation=kind, advantage_eps=eps
    )


def batch_normalize(case: Case) -> Answer:
    config = whitening("population", case.settings["eps"])
    advantages, tokens = np.array(case.inputs["advantages"]), np.array(case.inputs["trained_tokens"], dtype=float)
    return Answer(outputs={"advantages": normalize(advantages, Moments.of(advantages, tokens), config).tolist()})


def verl_whitened(values: np.ndarray, tokens: np.ndarray) -> tuple[list[float], bool]:
    """(whitened, whether the place of the eps shows beyond the oracle's tolerance)."""
    moments = Moments.of(values, tokens)
    variance = moments.deviation("sample") ** 2
    return normalize(values, moments, whitening("sample", VERL_EPS)).tolist(), variance < 0.1


def reinforce_plus_plus(case: Case) -> Answer:
    sequences = stamped(case)
    tokens = np.array(case.inputs["trained_tokens"])
    if case.settings["baseline"] is not None:
        centred = sequence_advantages(sequences, AlgorithmConfig(advantage="dr_grpo"))
        found, tiny = verl_whitened(centred, tokens.astype(float))
        if any(s.group_size == 1 for s in sequences):  # its advantage moves the mean of all
            return Answer(outputs={"advantages": found}, by_design=SINGLETON)
        return Answer(outputs={"advantages": found}, by_design=EPS_UNDER_THE_ROOT if tiny else None)
    index = torch.repeat_interleave(torch.arange(len(tokens)), torch.as_tensor(tokens))
    rewards = torch.as_tensor(sequence_advantages(sequences, AlgorithmConfig(advantage="reinforce")))[index]
    returns = discounted_sums(at_last_token(rewards, index), index, case.settings["gamma"])
    whitened, tiny = verl_whitened(returns.numpy(), np.ones(len(returns)))
    outputs: dict[str, Values] = {"token_returns": returns.tolist(), "token_advantages": whitened}
    return differing(case, outputs, [], EPS_UNDER_THE_ROOT) if not tiny else _but_for_whitening(case, outputs)


def _but_for_whitening(case: Case, outputs: dict[str, Values]) -> Answer:
    exact = judge(case, Answer(outputs={"token_returns": outputs["token_returns"]})).agrees
    alike = judge(case, Answer(outputs=outputs)).agrees
    return Answer(outputs=outputs, by_design=EPS_UNDER_THE_ROOT if exact and not alike else None)


def gae_(case: Case) -> Answer:
    tokens = Tokens.of(case)
    advantages, returns = gae(
        tokens.input("rewards"), tokens.input("values"), tokens.sequence, case.settings["gamma"], case.settings["lam"]
    )
    whitened, _ = verl_whitened(advantages.numpy(), np.ones(len(advantages)))
    return Answer(
        outputs={
            "raw_advantages": tokens.spread(advantages),
            "returns": tokens.spread(returns),
            "whitened_advantages": tokens.spread(torch.tensor(whitened, dtype=torch.float64)),
        }
    )


def value_loss_(case: Case) -> Answer:
    tokens = Tokens.of(case)
    values = tokens.input("value_predictions").requires_grad_()
    per_token, clipped = value_loss(
        values, tokens.input("old_values"), tokens.input("returns"), case.settings["value_clip"]
    )
    totals = MinibatchTotals(num_sequences=tokens.num_sequences, num_trained_tokens=len(values))
    loss = aggregate(
        per_token, torch.ones_like(clipped), tokens.sequence, tokens.num_sequences, totals, section(case, "reinforce")
    )
    (gradient,) = torch.autograd.grad(loss, values)
    return Answer(
        outputs={
            "loss": loss.item(),
            "gradient_wrt_value_predictions": tokens.spread(gradient),
            "counts.clipped_tokens": int(clipped.sum()),
        }
    )


def overlong_penalty(case: Case) -> Answer:
    config = OverlongPenaltyConfig.model_validate(dict(case.settings))
    lengths = case.inputs["response_tokens"]
    shaped = [r - penalty_of(n, config) for r, n in zip(case.inputs["rewards"], lengths, strict=True)]
    beyond = [i for i, n in enumerate(lengths) if n > config.max_tokens]
    return differing(case, {"shaped_rewards": shaped}, beyond, UNCAPPED)


def distillation(case: Case) -> Answer:
    teacher: dict[str, Any] = {"teacher_model": "the oracle's"}
    if case.oracle == "rlinf":
        return compared(
            case, run_loss(case, section(case, "reinforce", distillation={**teacher, "student": "behaviour"}))
        )
    config = section(
        case,
        "dppo",
        probability_low=case.settings["probability_drop_limit"],
        probability_high=1.0,
        behaviour_penalty=case.settings["kl_tau"],
        distillation=teacher,
    )
    found = compared(case, run_loss(case, config)).outputs
    tokens = Tokens.of(case)
    logprobs, behaviour = tokens.input("logprobs"), tokens.input("behaviour")
    fallen = behaviour.exp() - logprobs.exp() > case.settings["probability_drop_limit"]
    liked = fallen & (tokens.input("reference") > logprobs)
    gradients = {"gradient": found["gradient"]}
    if not liked.any():
        return Answer(outputs=found)
    return Answer(outputs=found, by_design=differing(case, gradients, tokens.index[liked].tolist(), FALLEN).by_design)


ADVANTAGE_ADAPTERS: dict[str, Adapter] = {
    "batch_normalize": batch_normalize,
    "distillation": distillation,
    "dr_grpo_advantage": dr_grpo_advantage,
    "gae": gae_,
    "grpo_advantage": grpo_advantage,
    "overlong_penalty": overlong_penalty,
    "reinforce_plus_plus": reinforce_plus_plus,
    "rloo_advantage": rloo_advantage,
    "value_loss": value_loss_,
}
