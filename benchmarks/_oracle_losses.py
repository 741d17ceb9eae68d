"""Adapters of the oracle files that are losses: from the oracle's settings to a section ``algorithm``, and back to its outputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from _oracle_run import LossOnCase, Tokens, run_loss, without
from _oracle_vectors import Adapter, Answer, Case, Values
from pydantic import TypeAdapter

from services.common.config.algorithm import AlgorithmConfig
from services.common.config.losses import LossConfig
from services.common.types import MinibatchTotals
from services.trainer.algorithms.aggregation import aggregate
from services.trainer.algorithms.kl import kl_per_token

_SECTION: TypeAdapter[Any] = TypeAdapter(LossConfig)

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
    """Loss, gradient and, where the oracle has it, the loss of each token; ``counts``: its name -> ours."""
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
    config = section(case, "cispo", importance_cap=case.settings["weight_upper"])
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
    values = kl_per_token(logprobs, tokens.input("reference"), case.settings["estimator"])
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
    """The tokens that define the bound are left out: the oracle's rounding decides on which side of the clip they fall."""
    found = run_loss(case, section(case, "m2po", m2po_threshold=case.settings["m2po_threshold"]))
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


def reinforce(case: Case) -> Answer:
    return compared(case, run_loss(case, section(case, "reinforce")))


def sapo(case: Case) -> Answer:
    config = section(
        case,
        "sapo",
        sapo_tau_positive=case.settings["tau_positive"],
        sapo_tau_negative=case.settings["tau_negative"],
    )
    return compared(case, run_loss(case, config))


def tis_token(case: Case) -> Answer:
    config = section(case, "tis", **clip(case), importance_cap=case.settings["importance_cap"])
    return compared(case, run_loss(case, config), {"truncated_tokens": "truncated_tokens"})


ADAPTERS: dict[str, Adapter] = {
    "aggregation": aggregation,
    "decoupled_ppo": decoupled_ppo,
    "dual_clip": ppo_clip,
    "gspo": gspo,
    "m2po": m2po,
    "m2po_mask": m2po_mask,
    "ppo_clip": ppo_clip,
}
