"""Finds names of models and datasets that the hub does not have. Asks once, with a short deadline and without retries.

A name that is in the cache of this machine is not asked for. A hub that cannot be reached is a problem of this machine
and not of the recipe.
"""

from __future__ import annotations

import functools
import os
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.cli.check.model_files import file_of, is_local
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError

ASK_TIMEOUT_S = 5.0
_ABSENT = (401, 403, 404)  # the hub answers 401 for a repository that is not there, without a token

Kind = Literal["models", "datasets"]


@dataclass(frozen=True, slots=True)
class HubProblem:
    """``of_machine``: the recipe may be right, and cannot be run from here."""

    text: str
    of_machine: bool


def hub_problems(recipe: Recipe) -> list[HubProblem]:
    """A problem for each model and dataset that is neither on this disk nor, as far as it answers, on the hub."""
    found = []
    for where, name in _models(recipe).items():
        found.append(look_up(where, name, "models"))
    for where, config in recipe.data.sections().items():
        path = config.path
        if path is not None and not is_local(path) and not Path(path).exists() and not Path(path).suffix:
            found.append(look_up(f"{where}.path", path, "datasets"))
    return [problem for problem in found if problem is not None]


def check_model_name(where: str, name: str) -> None:
    """Raises ``ConfigError`` for the name of a model that is not in the cache, and that the hub does not have or cannot be
    asked for."""
    if problem := look_up(where, name, "models"):
        raise ConfigError(problem.text)


def look_up(where: str, name: str, kind: Kind) -> HubProblem | None:
    """The problem with a name; None where it is in the cache or on the hub. ``where`` is the key that has the name."""
    what = f"{where}: {name} is no {'directory' if kind == 'models' else 'file or directory'}"
    if (wrong := _why_no_name(name)) is not None:
        return HubProblem(f"{what}, and no name of the hub either: {wrong}", of_machine=False)
    if _is_cached(name, kind):
        return None
    answer = _ask(name, kind)
    if isinstance(answer, int):
        return HubProblem(
            f"{what}, and the hub has no {kind.removesuffix('s')} of this name that you may read (it answered {answer}): correct "
            "the name, or log in with `hf auth login`",
            of_machine=False,
        )
    if answer:
        return HubProblem(
            f"{what} or name in the cache, and the hub cannot be asked ({answer}): write an existing directory, or fetch it "
            f"on a machine with internet with `hf download {'--repo-type dataset ' if kind == 'datasets' else ''}{name}`",
            of_machine=True,
        )
    return None


def _models(recipe: Recipe) -> dict[str, str]:
    """Names that are no directories, of models that a process of the run loads."""
    found = {}
    for name, policy in recipe.policies.items():
        path = policy.model.path
        engines = {
            service.engine for service in recipe.inference.values() if not service.policies or name in service.policies
        }
        # An engine of the user's, named by import path, knows itself whether it loads the model.
        loading = {engine for engine in engines if engine != "scripted" and ":" not in engine}
        loaded = (policy.trained and recipe.run.steps > 0) or loading
        if path is not None and loaded and not is_local(path):
            found[f"policies.{name}.model.path"] = path
    return found


def _why_no_name(name: str) -> str | None:
    try:
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError:
        return None
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        return str(error).splitlines()[0]
    return None


def _is_cached(name: str, kind: Kind) -> bool:
    if kind == "models":
        return file_of(name, "config.json") is not None
    try:
        from datasets import config
    except ImportError:
        return False
    return any(Path(config.HF_DATASETS_CACHE).glob(name.replace("/", "___")))


@functools.cache
def _ask(name: str, kind: Kind) -> str | int:
    """Empty if the hub has the name; else the status of the hub's answer, or the reason for which no request was possible."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    try:
        from huggingface_hub import constants, get_token
    except ImportError:
        return "the package huggingface_hub is not installed"
    if (dead := _unreachable.get(constants.ENDPOINT)) is not None:
        return dead
    headers = {"Authorization": f"Bearer {token}"} if (token := get_token()) else {}
    request = urllib.request.Request(f"{constants.ENDPOINT}/api/{kind}/{name}", headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=ASK_TIMEOUT_S):
            return ""
    except urllib.error.HTTPError as error:
        if error.code in _ABSENT:
            return error.code
        reason = f"it answered {error.code}"
    except (OSError, ValueError) as error:
        reason = str(getattr(error, "reason", error))
    _unreachable[constants.ENDPOINT] = reason
    return reason


_unreachable: dict[str, str] = {}  # endpoint -> reason: a machine without internet waits once
