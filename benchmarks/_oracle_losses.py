"""Adapters of the oracle files that are losses: from the oracle's settings to a section ``algorithm``, and back to its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import TypeAdapter

from benchmarks._oracle_run import LossOnCase, Tokens, run_loss, without
from benchmarks._oracle_vectors import Adapter, Answer, Case, Values
from services.common.config.algorithm import AlgorithmConfig, ImportanceSettings, LossConfig, Tis
from services.common.records import MinibatchTotals
from services.trainer.losses import TokenBatch, aggregate, importance_weights, kl_per_token, truncated, weight_sum

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


ADAPTERS: dict[str, Adapter] = {
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
