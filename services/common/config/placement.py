"""Which GPUs of which node each process of a recipe gets, and whether that adds up.

An inference service runs ``engines[policy]`` engines for each of its policies, each on ``tensor_parallel`` GPUs; a
trainer runs one rank per GPU. Nobody shares a GPU. A section without ``gpus`` is not checked: it runs on a CPU, or
takes whatever GPU it sees. Knows nothing about processes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.common.config.policy import PolicyConfig
from services.common.config.services import InferenceConfig


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
        return {served[0]: len(service.gpus) // service.sglang.tensor_parallel}
    return dict.fromkeys(served, 1)


def check_placement(inference: Mapping[str, InferenceConfig], policies: Mapping[str, PolicyConfig]) -> None:
    """Raises ``ValueError`` that names the key and says what to write."""
    for name, service in inference.items():
        _check_service(f"inference.{name}", service, service.policies or list(policies))
    for name, policy in policies.items():
        if policy.trained:
            _check_trainer(f"policies.{name}.trainer", policy)
    holders: dict[tuple[int, int], str] = {}
    for claim in gpu_claims(inference, policies):
        for gpu in claim.gpus:
            other = holders.setdefault((claim.node, gpu), claim.where)
            if other != claim.where:
                raise ValueError(
                    f"{claim.where} and {other} both take GPU {gpu} of node {claim.node}: "
                    "nobody shares a GPU, give one of them others"
                )


def _check_service(where: str, service: InferenceConfig, served: Sequence[str]) -> None:
    parallel = service.sglang.tensor_parallel
    for policy in service.engines:
        if policy not in served:
            raise ValueError(
                f"{where}.engines names {policy!r}, which {where} does not serve; write one of {list(served)}"
            )
    if service.engines and (missing := [policy for policy in served if policy not in service.engines]):
        raise ValueError(f"{where}.engines leaves out {', '.join(missing)}: write how many engines each policy gets")
    if len(set(service.gpus)) != len(service.gpus):
        raise ValueError(f"{where}.gpus {service.gpus} names a GPU twice")
    if service.engine != "sglang":
        _check_embedded(where, service)
        return
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
            f"({where}.sglang.tensor_parallel) do not fill: write a multiple of {parallel}"
        )
    needed = sum(engine_numbers(service, served).values()) * parallel
    if needed != len(service.gpus):
        raise ValueError(
            f"{where}: {sum(service.engines.values())} engines ({where}.engines) of {parallel} GPUs "
            f"({where}.sglang.tensor_parallel) take {needed} GPUs, but {where}.gpus has {len(service.gpus)}: "
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
    if len(service.gpus) > 1:
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
