"""What a deployment of a recipe consists of: its processes on every node, and ports that all of them know."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from services.cli.deploy.metrics import with_ports
from services.cli.plan import ProcessSpec, plan
from services.common.config.loading import load_recipe, port_variables, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

CHECKOUT = Path(__file__).resolve().parents[3]

# Where ports of their own begin, by the beginning of the variable that sets them.
_FIRST_PORTS = {
    "ORCHESTRATOR": 50050,
    "INFERENCE": 50061,
    "TRAINER": 50071,
    "ENVGATEWAY": 50080,
    "TASK": 5000,
    "CODE": 8000,
    "WEIGHTS": 19861,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A recipe whose every port is a number, and what is needed to say so to its processes."""

    recipe: Recipe
    path: str  # relative to the checkout, which images and nodes have as their working directory
    overrides: tuple[str, ...]
    ports: Mapping[str, str]  # variable -> port
    metrics_ports: Mapping[str, int] = field(default_factory=dict)  # process -> port; empty where metrics are off

    @property
    def nodes(self) -> list[int]:
        """The nodes that the recipe names, 0 first."""
        return self.recipe.nodes()

    def processes(self, node: int) -> list[ProcessSpec]:
        """The processes of a node, as ``millrace run`` and ``millrace start`` know them."""
        return plan(self.recipe, Path(), node)

    def needs_data(self) -> bool:
        """Whether it names datasets that are read from a folder of the machine."""
        sections = [self.recipe.data.train, *self.recipe.data.evaluation.values()]
        return any(section.name is not None for section in sections)


def lay_out(path: Path, overrides: Sequence[str] = ()) -> Layout:
    """Read a recipe and give every port that it leaves open (0) a number of its own.

    Environment variables of this machine do not count: what is written depends on the recipe and the overrides alone.

    Raises:
        ConfigError: the recipe cannot run, or lies outside the checkout, where other machines would not find it.
    """
    tree = load_recipe(path, overrides, {}).model_dump(mode="json")
    held = {int(value) for value in _ports(tree).values() if value}
    for name, keys in port_variables(tree).items():
        section = _section(tree, keys)
        if section[keys[-1]] == 0:
            first = _FIRST_PORTS[name.partition("_")[0]]
            section[keys[-1]] = next(port for port in count(first) if port not in held)
            held.add(section[keys[-1]])
    recipe = validate(tree, source=str(path))
    ports = {name: str(port) for name, port in _ports(tree).items() if port is not None}
    metrics_ports = with_ports(recipe, held) if recipe.metrics.enabled else {}
    return Layout(
        recipe=recipe,
        path=_in_checkout(path),
        overrides=tuple(overrides),
        ports=ports,
        metrics_ports=metrics_ports,
    )


def settings(overrides: Sequence[str]) -> list[str]:
    """Overrides as arguments."""
    return [part for override in overrides for part in ("--set", override)]


def written_by(layout: Layout, target: str) -> str:
    """The command that writes it again, without the directory."""
    return " ".join(["millrace deploy", layout.path, "--target", target, *settings(layout.overrides)])


def _ports(tree: Mapping[str, Any]) -> dict[str, int | None]:
    return {name: _section(tree, keys)[keys[-1]] for name, keys in port_variables(tree).items()}


def _section(tree: Mapping[str, Any], keys: Sequence[str]) -> Any:
    section: Any = tree
    for key in keys[:-1]:
        section = section[key]
    return section


def _in_checkout(path: Path) -> str:
    resolved = path.resolve()
    if not resolved.is_relative_to(CHECKOUT / "recipes"):
        raise ConfigError(
            f"{path} is not below {CHECKOUT / 'recipes'}: images and other nodes have the recipes of the checkout; put it there"
        )
    return resolved.relative_to(CHECKOUT).as_posix()
