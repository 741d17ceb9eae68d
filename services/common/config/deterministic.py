"""Checks the settings that ``run.deterministic`` requires, under which one seed gives the same weights, bit for bit.

The final weights are then a function of recipe and starting checkpoint: they depend neither on when rollouts finish, nor on
which replica plays them, nor on which processes die meanwhile (docs/protocol.md).
"""

from __future__ import annotations

from collections.abc import Mapping

from services.common.config.data import DataConfig, WorkflowConfig
from services.common.config.processes.services import InferenceConfig
from services.common.config.training.policy import PolicyConfig

# A rollout of these brings several sequences, of a number that is known only when it ends.
_SEVERAL_SEQUENCES = ("actor_verifier", "codegen_verifier", "external_agent")


def conflicts(
    policies: Mapping[str, PolicyConfig],
    workflow: WorkflowConfig,
    data: DataConfig,
    inference: Mapping[str, InferenceConfig],
) -> list[str]:
    """Settings that prevent a bit-exact repetition, each with the setting to write instead."""
    return [*_of_the_run(policies, workflow, data), *_of_policies(policies), *_of_engines(inference)]


def _of_the_run(policies: Mapping[str, PolicyConfig], workflow: WorkflowConfig, data: DataConfig) -> list[str]:
    found = []
    if len(policies) > 1:
        found.append(f"policies has {', '.join(policies)}: keep one")
    if workflow.name in _SEVERAL_SEQUENCES:
        found.append(
            f"workflow.name is {workflow.name}, whose rollouts bring several sequences: write one of single_turn, "
            "tool_use, tool_math, agent_env"
        )
    if data.sources:
        found.append(f"data.train mixes {', '.join(data.sources)}: write one dataset")
    if data.curation != "accept_all":
        found.append(f"data.curation is {data.curation}, which chooses tasks by finished rollouts: write accept_all")
    return found


def _of_policies(policies: Mapping[str, PolicyConfig]) -> list[str]:
    found = []
    for name, policy in policies.items():
        where = f"policies.{name}"
        if policy.batch.max_staleness:
            found.append(
                f"{where}.batch.max_staleness is {policy.batch.max_staleness}: write 0, so that every rollout of a step plays "
                "the version before it"
            )
        if policy.batch.replay.ratio:
            found.append(f"{where}.batch.replay.ratio is {policy.batch.replay.ratio:g}: write 0")
        trainer = policy.trainer
        for key, value, wanted in (
            ("device", trainer.device, "cpu"), ("num_ranks", trainer.num_ranks, 1), ("threads", trainer.threads, 1),
        ):  # fmt: skip
            if value != wanted:
                found.append(f"{where}.trainer.{key} is {value}: write {wanted}")
    return found


def _of_engines(inference: Mapping[str, InferenceConfig]) -> list[str]:
    found = []
    for name, service in inference.items():
        where = f"inference.{name}"
        if service.servers is not None:
            found.append(
                f"{where}.engine is {service.engine}, whose arithmetic depends on which requests run together: write torch"
            )
            continue
        if ":" in service.engine:
            found.append(f"{where}.engine is {service.engine}, which is not known to be deterministic: write torch")
            continue
        if service.engine_slots not in (None, 1):
            found.append(
                f"{where}.engine_slots is {service.engine_slots}: leave it out, one request is computed at a time"
            )
        if service.engine != "scripted":
            for key, value, wanted in (("device", service.device, "cpu"), ("threads", service.threads, 1)):
                if value != wanted:
                    found.append(f"{where}.{key} is {value}: write {wanted}")
    return found
