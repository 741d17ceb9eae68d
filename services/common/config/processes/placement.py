"""Assigns devices of nodes to the processes of a recipe, and checks the assignment.

An inference service runs ``engines[policy]`` engines for each of its policies, each on ``tensor_parallel`` GPUs; a
trainer runs one rank per GPU. Only with ``placement: shared`` do trainers and inference services take the same GPUs. A section without ``gpus`` is not checked: its process runs on a CPU,
or takes any visible GPU.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.config.processes.services import InferenceConfig
from services.common.config.training.policy import PolicyConfig

SHARED_ENGINES = ("torch", "forced", "scripted")  # which free their memory on request


class Placement(enum.StrEnum):
    """Devices of rollouts and training."""

    AUTO = "auto"  # ``shared`` on a machine with one GPU where no section names GPUs, else ``apart``
    APART = "apart"  # each has its own, and both compute at the same time
    SHARED = "shared"  # both have the same, and take turns


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuClaim:
    """GPUs that one process gets for itself."""

    where: str  # the key that says so
    node: int
    gpus: tuple[int, ...]


def gpu_claims(inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig]) -> list[GpuClaim]:
    """Every section that names GPUs; a trainer takes them on each of its nodes."""
    claims = [
        GpuClaim(where=f"inference.{name}.gpus", node=service.node, gpus=tuple(service.gpus))
        for name, service in inference.items()
    ]
    claims += [
        GpuClaim(where=f"policies.{name}.trainer.gpus", node=node, gpus=tuple(policy.trainer.gpus))
        for name, policy in policies.items()
        if policy.trained
        for node in policy.trainer.nodes
    ]
    return [claim for claim in claims if claim.gpus]


def engine_numbers(service: InferenceConfig, served: Sequence[str]) -> dict[str, int]:
    """Engines of each policy that a service serves: its own numbers, else all GPUs for its only policy, else one each."""
    if service.engines:
        return dict(service.engines)
    if service.gpus and len(served) == 1:
        return {served[0]: len(service.gpus) // (service.servers.tensor_parallel if service.servers else 1)}
    return dict.fromkeys(served, 1)


def check_placement(
    inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig], placement: Placement
) -> None:
    """Raise ``ValueError`` that names the key and the value to write."""
    for name, service in inference.items():
        _check_service(f"inference.{name}", service, service.policies or list(policies))
    for name, policy in policies.items():
        if policy.trained:
            _check_trainer(f"policies.{name}.trainer", policy)
    if placement is Placement.SHARED:
        _check_shared(inference, policies)
        return
    holders: dict[tuple[int, int], str] = {}
    for claim in gpu_claims(inference, policies):
        for gpu in claim.gpus:
            other = holders.setdefault((claim.node, gpu), claim.where)
            if other != claim.where:
                raise ValueError(
                    f"{claim.where} and {other} both take GPU {gpu} of node {claim.node}: "
                    "give one of them others, or let them take turns with placement: shared"
                )


def _check_shared(inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig]) -> None:
    nodes = {f"inference.{name}.node": [service.node] for name, service in inference.items()}
    nodes |= {f"policies.{name}.trainer.nodes": policy.trainer.nodes for name, policy in policies.items()}
    for where, named in nodes.items():
        if list(named) != [0]:
            raise ValueError(
                f"placement is shared, and {where} is {named if len(named) > 1 else named[0]}: the devices that take turns "
                "are those of node 0, so leave it out, or write placement: apart"
            )
    for name, service in inference.items():
        if service.engine not in SHARED_ENGINES:
            raise ValueError(
                f"placement is shared, and inference.{name}.engine is {service.engine}, which does not free its memory "
                f"between turns: write {SHARED_ENGINES[0]}, or placement: apart"
            )


def _check_service(where: str, service: InferenceConfig, served: Sequence[str]) -> None:
    for policy in service.engines:
        if policy not in served:
            raise ValueError(
                f"{where}.engines names {policy!r}, which {where} does not serve; write one of {list(served)}"
            )
    if service.engines and (missing := [policy for policy in served if policy not in service.engines]):
        raise ValueError(f"{where}.engines leaves out {', '.join(missing)}: write how many engines each policy gets")
    if len(set(service.gpus)) != len(service.gpus):
        raise ValueError(f"{where}.gpus {service.gpus} names a GPU twice")
    if service.servers is None:
        _check_embedded(where, service)
        return
    parallel, setting = service.servers.tensor_parallel, f"{where}.{service.engine}.tensor_parallel"
    if not service.gpus:
        return
    if len(served) > 1 and not service.engines:
        example = ", ".join(f"{policy}: {max(1, len(service.gpus) // parallel // len(served))}" for policy in served)
        raise ValueError(
            f"{where} serves {', '.join(served)} on {len(service.gpus)} GPUs: write how many engines each gets, "
            f"such as {where}.engines: {{{example}}}"
        )
    if not service.engines and len(service.gpus) % parallel:
        raise ValueError(
            f"{where}.gpus has {len(service.gpus)} GPUs, which engines of {parallel} GPUs "
            f"({setting}) do not fill: write a multiple of {parallel}"
        )
    needed = sum(engine_numbers(service, served).values()) * parallel
    if needed != len(service.gpus):
        raise ValueError(
            f"{where}: {sum(service.engines.values())} engines ({where}.engines) of {parallel} GPUs "
            f"({setting}) take {needed} GPUs, but {where}.gpus has {len(service.gpus)}: "
            f"write {needed} GPUs there, or other numbers of engines"
        )


def _check_embedded(where: str, service: InferenceConfig) -> None:
    """Engines inside the service: one for each policy, all on one device."""
    if any(number > 1 for number in service.engines.values()):
        raise ValueError(
            f"{where}.engines: engine {service.engine} is one per policy; write 1, or {where}.engine: sglang"
        )
    if service.gpus and (service.engine == "scripted" or service.device == "cpu"):
        raise ValueError(f"{where}.gpus is {service.gpus}, but this service uses no GPU: leave gpus out")
    if len(service.gpus) > 1 and ":" not in service.engine:
        raise ValueError(
            f"{where}.gpus has {len(service.gpus)} GPUs, but engine {service.engine} uses one: write one, "
            f"or {where}.engine: sglang"
        )


def _check_trainer(where: str, policy: PolicyConfig) -> None:
    trainer = policy.trainer
    _check_nodes(where, policy)
    if not trainer.gpus:
        return
    if len(set(trainer.gpus)) != len(trainer.gpus):
        raise ValueError(f"{where}.gpus {trainer.gpus} names a GPU twice")
    if trainer.device == "cpu":
        raise ValueError(f"{where}.gpus is {trainer.gpus}, but {where}.device is cpu: leave one of them out")
    held = len(trainer.gpus) * len(trainer.nodes)
    if held != trainer.num_ranks:
        on = f" on each of {len(trainer.nodes)} nodes" if len(trainer.nodes) > 1 else ""
        raise ValueError(
            f"{where}.gpus has {len(trainer.gpus)} GPUs{on} for {trainer.num_ranks} ranks, which have one each: "
            f"write {where}.num_ranks: {held}, or {trainer.num_ranks // len(trainer.nodes)} GPUs"
        )


def _check_nodes(where: str, policy: PolicyConfig) -> None:
    trainer = policy.trainer
    num_nodes = len(trainer.nodes)
    if trainer.nodes[0] != 0 or len(set(trainer.nodes)) != num_nodes:
        raise ValueError(
            f"{where}.nodes is {trainer.nodes}: the first rank, which publishes, is on node 0; "
            "write 0 first and no node twice"
        )
    if num_nodes == 1:
        return
    if trainer.num_ranks % num_nodes:
        raise ValueError(
            f"{where}.num_ranks is {trainer.num_ranks}, which {num_nodes} nodes ({where}.nodes) cannot share evenly: "
            f"write a multiple of {num_nodes}"
        )
    if not trainer.rendezvous_port:
        raise ValueError(
            f"{where}.rendezvous_port is 0, a free port, which other nodes cannot know: write a number, such as 29541"
        )
    if not trainer.interface:
        raise ValueError(
            f"{where}.interface is missing: ranks on several nodes exchange gradients unencrypted, so name the network "
            "interface of a private network between them, such as eth1"
        )
