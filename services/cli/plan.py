"""Which processes a recipe needs on this node, with their command lines. Starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.cli.free_ports import free_ports, is_free
from services.common.config.recipe import Recipe, warm_start_dir


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One process of a run."""

    name: str
    argv: tuple[str, ...]
    address: str  # where its health service answers
    env: Mapping[str, str] = field(default_factory=dict)


def plan(recipe: Recipe, run_dir: Path) -> list[ProcessSpec]:
    """Every process of the run, orchestrator first. Start-up order does not matter: each waits for what it needs."""
    orchestrator = f"{recipe.orchestrator.host}:{recipe.orchestrator.port}"
    specs = [_spec("orchestrator", orchestrator, "services.orchestrator", "--run-dir", str(run_dir))]
    if recipe.envgateway is not None:
        address = f"{recipe.envgateway.host}:{recipe.envgateway.port}"
        specs.append(_spec("envgateway", address, "services.envgateway", "--run-dir", str(run_dir)))
    for name, service in recipe.inference.items():
        specs.append(
            _spec(
                f"inference-{name}",
                f"{service.host}:{service.port}",
                *("services.inference", "--name", name, "--orchestrator", orchestrator),
                threads=service.threads,
            )
        )
    for name, policy in recipe.policies.items() if recipe.run.steps else ():
        arguments = ("--policy", name, "--orchestrator", orchestrator, "--run-dir", str(run_dir))
        ranks = policy.trainer.num_ranks
        module = ("services.trainer",) if ranks == 1 else ("services.trainer.launch_ranks", f"--num-ranks={ranks}")
        specs.append(
            _spec(
                f"trainer-{name}",
                f"127.0.0.1:{policy.trainer.port}",
                *(*module, *arguments),
                threads=policy.trainer.threads,
            )
        )
    return specs


def warm_start_commands(recipe: Recipe, run_dir: Path) -> list[ProcessSpec]:
    """The processes that make the starting checkpoints which are not there yet, one for each policy."""
    return [
        _spec(
            f"warm-start-{policy}",
            "",
            *("services.trainer.warm_start", "--policy", policy, "--run-dir", str(run_dir)),
            threads=recipe.policies[policy].trainer.threads,
        )
        for policy in recipe.warm_start
        if not (warm_start_dir(run_dir, policy) / "config.json").exists()
    ]


def with_free_ports(recipe: Recipe) -> Recipe:
    """The same recipe with every port 0 replaced by a free one, so that the resolved recipe names real addresses."""
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    sections = [tree["orchestrator"], *tree["inference"].values()]
    sections += [tree["envgateway"]] if tree["envgateway"] else []
    sections += [section for policy in tree["policies"].values() for section in (policy["trainer"], policy["weights"])]
    open_sections = [section for section in sections if section["port"] == 0]
    for section, port in zip(open_sections, free_ports(len(open_sections)), strict=True):
        section["port"] = port
    return Recipe.model_validate(tree)


def ports_in_use(recipe: Recipe) -> list[str]:
    """The settings whose port somebody else holds on this machine, with what to do."""
    problems = []
    for where, port in recipe.ports():
        if port and not is_free(port):
            problems.append(f"{where}: port {port} is in use; stop what holds it or run with --set {where}=0")
    return problems


def _spec(name: str, address: str, module: str, *arguments: str, threads: int = 1) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        argv=(sys.executable, "-m", module, *arguments),
        address=address,
        env={"OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"},
    )
