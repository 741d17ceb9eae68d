"""Lists the processes that a recipe needs on this node, with their command lines. Starts no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.common.config.processes.envgateway import EnvGatewayConfig
from services.common.config.recipe import Recipe, warm_start_dir
from services.common.net.hosts import address, is_here
from services.common.system.child import module_command, module_in
from services.common.system.free_ports import LOOPBACK, free_ports, is_free

# Names that `rollmill start` takes beside those of processes: what is made before a run, once.
WARM_START = "warm-start"
WORLDS = "worlds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run."""

    name: str
    argv: tuple[str, ...]
    address: str  # where its health service answers
    forked: bool = False  # from a process that has its imports, instead of an interpreter of its own
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The command as people write it."""
        module, arguments = module_in(self.argv)
        return " ".join(["python", "-m", module, *arguments])


def plan(recipe: Recipe, run_dir: Path, node: int = 0) -> list[ProcessSpec]:
    """Every process of the run on one node, orchestrator first. Other nodes have inference services, shares of
    trainers, and the gateway where the recipe says so.

    Start-up order does not matter: each waits for its dependencies.
    """
    orchestrator = orchestrator_address(recipe)
    services = [
        inference_process(recipe, name, orchestrator)
        for name, service in recipe.inference.items()
        if service.node == node
    ]
    trainers = [
        trainer_process(recipe, policy, orchestrator, "--run-dir", str(run_dir), node=node)
        for policy, section in (
            recipe.trained_policies.items() if recipe.run.steps else ()
        )  # without steps it only evaluates
        if node in section.trainer.nodes
    ]
    specs = []
    if node == 0:
        argv = ("services.orchestrator", "--run-dir", str(run_dir))
        specs.append(_spec("orchestrator", orchestrator, *argv))
    if recipe.envgateway is not None and recipe.envgateway.node == node:
        specs.append(gateway_process(recipe.envgateway, run_dir, "--orchestrator", orchestrator))
    return [*specs, *services, *trainers]


def orchestrator_address(recipe: Recipe) -> str:
    """Where node 0 itself finds the orchestrator."""
    return address(recipe.orchestrator.host, recipe.orchestrator.port)


def gateway_process(gateway: EnvGatewayConfig, run_dir: Path, *more: str, host: str | None = None) -> ProcessSpec:
    """The environment gateway with the settings in ``run_dir``; ``host`` is a bind address other than the recipe's."""
    own = () if host is None else ("--host", host)
    where = address(host or gateway.host, gateway.port)
    argv = ("services.envgateway", "--run-dir", str(run_dir), *own, *more)
    return _spec("envgateway", where, *argv)


def inference_process(recipe: Recipe, name: str, orchestrator: str, *more: str, host: str | None = None) -> ProcessSpec:
    """One inference service, dialling the orchestrator at this address; ``host`` is a bind address other than the recipe's."""
    service = recipe.inference[name]
    own = () if host is None else ("--host", host)
    return _spec(
        f"inference-{name}",
        address(host or service.host, service.port),
        *("services.inference", "--name", name, "--orchestrator", orchestrator, *own, *more),
        threads=service.threads,
        gpus=service.gpus,
        # A process that may use a GPU starts on its own, and so does one that imports no torch.
        forked=service.engine in ("torch", "forced") and service.device == "cpu",
    )


def trainer_name(policy: str, node: int) -> str:
    """The name of a trainer's process on one of its nodes."""
    return f"trainer-{policy}" if node == 0 else f"trainer-{policy}-node{node}"


def trainer_process(
    recipe: Recipe,
    policy: str,
    orchestrator: str,
    *more: str,
    host: str | None = None,
    node: int = 0,
    meeting: str = LOOPBACK,
) -> ProcessSpec:
    """The trainer of one policy, its ranks under one launcher; ``host``: where its versions are fetched, if not as the
    recipe says.

    Of a trainer over several nodes, the share of ``node``; its ranks meet those of node 0 at the host ``meeting``.
    """
    trainer = recipe.policies[policy].trainer
    num_nodes = len(trainer.nodes)
    own = () if host is None else ("--host", host)
    module = ["services.trainer"]
    if trainer.num_ranks > 1:
        module = ["services.trainer.launch_ranks", f"--num-ranks={trainer.num_ranks // num_nodes}"]
        if trainer.rendezvous_port:
            module.append(f"--rendezvous-port={trainer.rendezvous_port}")
    if num_nodes > 1:
        place = (f"--num-nodes={num_nodes}", f"--node-rank={trainer.nodes.index(node)}", f"--rendezvous-host={meeting}")
        module += [*place, f"--interface={trainer.interface}"]
    return _spec(
        trainer_name(policy, node),
        address(LOOPBACK, trainer.port) if node == 0 else "",  # the first rank answers for all
        *(*module, "--policy", policy, "--orchestrator", orchestrator, *own, *more),
        threads=trainer.threads,
        gpus=trainer.gpus,
        forked=trainer.num_ranks == 1 and trainer.device == "cpu",
    )


def warm_start_commands(recipe: Recipe, run_dir: Path) -> list[ProcessSpec]:
    """The processes that make the starting checkpoints which are not there yet, one for each policy."""
    return [
        _spec(
            f"warm-start-{policy}",
            "",
            *("services.trainer.warm_start", "--policy", policy, "--run-dir", str(run_dir)),
            threads=recipe.policies[policy].trainer.threads,
            forked=recipe.policies[policy].trainer.device == "cpu",
        )
        for policy in recipe.warm_start
        if not (warm_start_dir(run_dir, policy) / "config.json").exists()
    ]


def with_free_ports(recipe: Recipe) -> Recipe:
    """The same recipe with every port 0 replaced by a free one, so that the resolved recipe names real addresses.

    Services of other nodes find one for themselves.
    """
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    sections = {"orchestrator": tree["orchestrator"]}
    sections |= {f"inference.{name}": each for name, each in tree["inference"].items() if each["node"] == 0}
    if recipe.envgateway and recipe.envgateway.node == 0:
        sections["envgateway"] = tree["envgateway"]
    for name, policy in tree["policies"].items():
        sections |= {f"policies.{name}.{part}": policy[part] for part in ("trainer", "weights")}
    open_sections = {name: section for name, section in sections.items() if section["port"] == 0}
    hosts = sorted({LOOPBACK, *(section["host"] for section in sections.values() if "host" in section)})
    named = {port for _, port in recipe.ports()}  # of processes that are not listening yet
    for section, port in zip(open_sections.values(), free_ports(len(open_sections), hosts, named), strict=True):
        section["port"] = port
    chosen = {*recipe.launch.chosen_ports, *(f"{name}.port" for name in open_sections)}
    tree["launch"]["chosen_ports"] = sorted(chosen)
    return Recipe.model_validate(tree)


def taken_ports(recipe: Recipe) -> list[tuple[str, int]]:
    """Settings with a port that another process holds on this machine, node 0, and that port."""
    elsewhere = {
        f"inference.{name}.{port}"
        for name, service in recipe.inference.items()
        if service.node != 0
        for port in ("port", "endpoint.port")
    }
    elsewhere |= {"envgateway.port"} if recipe.envgateway and recipe.envgateway.node != 0 else set()
    hosts = recipe.hosts
    taken = []
    for where, port in recipe.ports():
        host = hosts.get(f"{where.removesuffix('.port')}.host", LOOPBACK)
        if port and where not in elsewhere and is_here(host) and not is_free(port, host):
            taken.append((where, port))
    return taken


def ports_in_use(recipe: Recipe) -> list[str]:
    """One line for each of ``taken_ports``, with the remedy."""
    return [
        f"{where}: port {port} is in use; stop the process that holds it or run with --set {where}=0"
        for where, port in taken_ports(recipe)
    ]


def _spec(
    name: str,
    address: str,
    module: str,
    *arguments: str,
    threads: int = 1,
    gpus: Sequence[int] = (),
    forked: bool = False,
) -> ProcessSpec:
    env = {"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    if gpus:
        env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return ProcessSpec(
        name=name,
        argv=module_command(module, *arguments),
        address=address,
        env=env,
        forked=forked and threads == 1 and not gpus,  # the number of threads is read when torch is imported
    )
