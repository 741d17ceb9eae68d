"""Finds missing, broken and truncated files in a local model directory, without loading the model.

Reads names, ``config.json`` and the headers of safetensors files, so a model of any size is looked through at once.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from services.common.config.loading import RESOLVED
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.safetensors_files import INDEX, SINGLE, config_of, file_of, places, read_object, weight_files
from services.common.system.child import module_command

_GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")  # in the names of architectures
_STRETCHED = {"yarn", "linear", "dynamic"}  # kinds of rope scaling whose positions config.json may not count


def positions(model: str) -> int | None:
    """The longest sequence of a model by its ``config.json``; None where it does not say, or stretches its positions."""
    config = config_of(model)
    text = config.get("text_config")  # of models that also see
    for section in (config, text if isinstance(text, dict) else {}):
        scalings = [section.get(key) for key in ("rope_scaling", "rope_parameters")]
        kinds = {scaling.get("rope_type", scaling.get("type")) for scaling in scalings if isinstance(scaling, dict)}
        for key in ("max_position_embeddings", "n_positions", "n_ctx"):
            found = section.get(key)
            if isinstance(found, int) and not isinstance(found, bool) and found > 0:
                return None if kinds & _STRETCHED else found
    return None


def other_architecture(model: str) -> str | None:
    """The architecture of a model that does not generate text, by its ``config.json``; None of one that does, or is unknown."""
    named = config_of(model).get("architectures")
    found = [name for name in named if isinstance(name, str)] if isinstance(named, list) else []
    if not found or any(part in name for name in found for part in _GENERATING):
        return None
    return found[0]


def lacks_chat_template(model: str) -> bool:
    """Whether the files of a model's tokenizer are here and hold no chat template."""
    config = file_of(model, "tokenizer_config.json")
    if config is None or not any(file_of(model, name) for name in ("tokenizer.json", "tokenizer.model", "vocab.json")):
        return False  # it is fetched later, or another check tells what is missing
    if file_of(model, "chat_template.jinja") or file_of(model, "chat_template.json"):
        return False
    try:
        return not read_object(config).get("chat_template")
    except ConfigError:
        return False


def model_problems(recipe: Recipe) -> list[str]:
    """A line for each model directory that cannot be used; names of a hub are taken as they are."""
    named = {}
    for name, policy in recipe.policies.items():
        named[f"policies.{name}.model.path"] = policy.model.path
        distillation = policy.algorithm.distillation
        if distillation is not None and name not in recipe.teachers:  # else the teacher is a policy of its own
            named[f"policies.{name}.algorithm.distillation.teacher_model"] = distillation.teacher_model
    folders = {where: Path(path) for where, path in named.items() if path is not None and is_local(path)}
    return [f"{where}: {problem}" for where, folder in folders.items() if (problem := _problem(folder)) is not None]


def is_local(path: str) -> bool:
    """Whether a path is on this machine, or can only be: no name of the hub begins or ends so."""
    return Path(path).exists() or path.startswith(("/", ".", "~")) or path.endswith(".gguf")


def model_instead(folder: Path) -> str:
    """The remedy for a directory that is no model: models that it holds, or the command that makes one."""
    configs = (config for name in ("*", "export/*") for config in folder.glob(f"{name}/config.json"))
    if models := sorted(config.parent for config in configs if any(config.parent.glob("*.safetensors"))):
        return f"write {' or '.join(map(str, models))}"
    run = next((up for up in (folder, *folder.absolute().parents) if (up / RESOLVED).is_file()), None)
    of_run = (
        f"it is of a run: write the directory that `rollmill export {run}` makes of a checkpoint (--policy, --step)"
    )
    return "write a Hugging Face model directory or a hub name" if run is None else of_run


def _problem(folder: Path) -> str | None:
    quantised = [folder] if folder.is_file() and folder.suffix == ".gguf" else sorted(folder.glob("*.gguf"))
    if quantised and not (folder / "config.json").is_file():
        return (
            f"{quantised[0]} is a GGUF file, and training needs weights in safetensors: load it with transformers "
            "(`gguf_file=`) and save_pretrained it, and write that directory"
        )
    if not folder.is_dir():
        return (
            f"{folder} is no directory, so it holds no config.json; write a Hugging Face model directory or a hub name"
        )
    for needed in ("config.json", "tokenizer_config.json"):
        if not (folder / needed).is_file():
            return f"{folder} holds no {needed}; {model_instead(folder)}"
    for name in ("config.json", "tokenizer_config.json", "tokenizer.json", "generation_config.json"):
        try:
            if (folder / name).is_file():
                read_object(folder / name)
        except ConfigError as error:
            return error.message
    tensors = sorted(folder.glob("*.safetensors"))
    if not tensors and (pickled := sorted(folder.glob("*.bin"))):
        return (
            f"{folder} holds pickled weights only ({pickled[0].name}), which are not read: convert them to safetensors"
        )
    if not tensors:
        return f"{folder} holds no weights (*.safetensors): copy the whole model directory; {model_instead(folder)}"
    try:
        if (folder / INDEX).is_file() or (folder / SINGLE).is_file():
            weight_files(folder)
        for file in tensors:
            places(file)
    except ConfigError as error:
        return error.message
    return None


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
    answer: str | int = "the package huggingface_hub is not installed"
    with contextlib.suppress(ImportError):
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id

        try:
            validate_repo_id(name)
        except HFValidationError as error:
            wrong = str(error).splitlines()[0]
            return HubProblem(f"{what}, and no name of the hub either: {wrong}", of_machine=False)
        if _is_cached(name, kind):
            return None
        answer = _ask(name, kind)
    if isinstance(answer, str):
        return HubProblem(
            f"{what} or name in the cache, and the hub cannot be asked ({answer}): write an existing directory, or fetch it "
            f"on a machine with internet with `hf download {'--repo-type dataset ' if kind == 'datasets' else ''}{name}`",
            of_machine=True,
        )
    if answer in _ABSENT:
        return HubProblem(
            f"{what}, and the hub has no {kind.removesuffix('s')} of this name that you may read (it answered {answer}): correct "
            "the name, or log in with `hf auth login`",
            of_machine=False,
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
    """The status of the hub's answer, or the reason for which there is none that tells whether it has the name."""
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers, get_session

    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        return "HF_HUB_OFFLINE is set"
    if (dead := _unreachable.get(constants.ENDPOINT)) is not None:
        return dead
    url = f"{constants.ENDPOINT}/api/{kind}/{name}"
    try:
        status: int = get_session().get(url, headers=build_hf_headers(), timeout=ASK_TIMEOUT_S).status_code
    except Exception as error:  # noqa: BLE001 - of the package's HTTP client, which changes with its version
        reason = str(error)
    else:
        if status < 400 or status in _ABSENT:
            return status
        reason = f"it answered {status}"
    return _unreachable.setdefault(constants.ENDPOINT, reason)


_unreachable: dict[str, str] = {}  # endpoint -> reason: a machine without internet waits once


# --- Asks trainer and torch engine, each in a process of its own, whether they compute the models of a recipe, by their
# configs: the command line imports no torch. A process reads ``config.json`` and no weights, and takes some seconds.


_DEADLINE_S = 180.0
_TRIAL = "services.cli.check.trial"
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
        adapter = "null" if policy.adapter is None else policy.adapter.model_dump_json()
        for service, config in recipe.inference.items():
            if config.engine in _ON_THE_DECODER and (not config.policies or name in config.policies):
                yield f"{where}, inference.{service}", module_command(_TRIAL, "engine", folder, adapter)
        if policy.trained and recipe.run.steps:
            yield where, module_command(_TRIAL, "trainer", folder, str(policy.model.context_length))
