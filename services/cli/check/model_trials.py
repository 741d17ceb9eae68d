"""Asks trainer and torch engine, each in a process of its own, whether they compute the models of a recipe, by their configs.

The command line imports no torch. A process reads ``config.json`` and no weights, and takes some seconds.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

from services.cli.check.models import file_of
from services.common.config.recipe import Recipe
from services.common.system.child import module_command

_DEADLINE_S = 180.0
_ON_THE_DECODER = ("torch", "forced")


def model_trials(recipe: Recipe) -> tuple[list[str], list[str]]:
    """(problems, notes), a line for each policy and service that refuses its model, or could not be asked."""
    problems, notes = [], []
    for where, command in _questions(recipe):
        try:
            answer = subprocess.run(command, check=False, capture_output=True, text=True, timeout=_DEADLINE_S)
        except (OSError, subprocess.SubprocessError) as error:
            notes.append(f"{where}: could not be tried ({error}), so the run tries it at its start")
            continue
        said = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        if answer.returncode == 2:
            problems.append(f"{where}: {said}")
        elif answer.returncode:
            notes.append(f"{where}: could not be tried ({said}), so the run tries it at its start")
        notes += [f"{where}: {line}" for line in answer.stdout.splitlines()]
    return problems, notes


def _questions(recipe: Recipe) -> Iterator[tuple[str, tuple[str, ...]]]:
    for name, policy in recipe.policies.items():
        file = file_of(policy.model.path or "", "config.json")
        if file is None:
            continue
        folder, where = str(file.parent), f"policies.{name}.model.path"
        for service, config in recipe.inference.items():
            if config.engine in _ON_THE_DECODER and (not config.policies or name in config.policies):
                adapter = () if policy.adapter is None else (policy.adapter.model_dump_json(),)
                yield (
                    f"{where}, inference.{service}",
                    module_command("services.inference.engine.torch.check", folder, *adapter),
                )
        if policy.trained and recipe.run.steps:
            yield where, module_command("services.trainer.model.check", folder, str(policy.model.context_length))
