"""The card of a pushed model: where it comes from and what was measured, as Markdown with the hub's metadata. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import yaml

from services.common.config.recipe import Recipe
from services.common.telemetry.metrics import RowKind

Row = Mapping[str, Any]

_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def card(recipe: Recipe, policy: str, step: int, rows: Iterable[Row]) -> str:
    """The README.md of a model repository. ``rows`` are those of the run's metrics."""
    section = recipe.policies[policy]
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["millrace", "reinforcement-learning"]}
    if _is_hub_name(section.model.path):
        metadata["base_model"] = section.model.path
    paths = {config.path for config in recipe.data.sections().values() if config.path is not None}
    datasets = sorted(path for path in paths if _is_hub_name(path))
    if datasets:
        metadata["datasets"] = datasets
    evaluations = _evaluations(rows, policy)
    lines = [
        "---",
        yaml.safe_dump(metadata, sort_keys=False).rstrip(),
        "---",
        "",
        f"# {recipe.name}, {policy} at step {step}",
        "",
        f"{recipe.description or 'A model'}. Trained by reinforcement learning with Millrace: run `{recipe.run.id}`, training "
        f"step {step} of at most {recipe.run.steps}.",
        "",
        f"* loss `{section.algorithm.name}`, advantage `{section.algorithm.advantage}`, learning rate {section.optimizer.lr:g}",
        f"* batches of {section.batch.size} sequences in groups of {recipe.rollout.group_size}, at most "
        f"{section.batch.max_staleness} versions old",
        f"* workflow `{recipe.workflow.name}`, seed {recipe.run.seed}",
        "",
    ]
    if evaluations:
        lines += ["| evaluation | version | mean reward | tasks |", "|---|---|---|---|", *evaluations, ""]
    return "\n".join(lines)


def _evaluations(rows: Iterable[Row], policy: str) -> list[str]:
    """The first and the newest evaluation of each dataset and sampling, as rows of a table."""
    found: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for row in rows:
        if row.get("kind") == RowKind.EVALUATION and policy in row["versions"]:
            for dataset in row["datasets"]:
                key = row["name"].partition("/")[2], dataset["name"]
                found.setdefault(key, []).append((row["versions"][policy], dataset))
    table = []
    for (sampling, name), results in found.items():
        results.sort(key=lambda result: result[0])
        for version, dataset in [results[0], *results[1:][-1:]]:
            mean = dataset["mean_reward"]
            told = f"{mean['value']:.3f} ({mean['low']:.3f} to {mean['high']:.3f})"
            table.append(f"| {name}, {sampling} | {version} | {told} | {dataset['num_items']} |")
    return table


def _is_hub_name(path: str | None) -> bool:
    """Whether a path has the form of a name on the hub, not of a file."""
    if path is None or path.startswith((".", "/", "~")):
        return False
    return path.count("/") <= 1 and not path.endswith(_FILES)
