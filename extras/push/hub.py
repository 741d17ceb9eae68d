"""Uploads a checkpoint of a run, with a card, as one commit to the hub of huggingface_hub: HF_ENDPOINT, and HF_TOKEN or
``hf auth login``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Template

from services.cli.inspect.checkpoints import export_run
from services.cli.inspect.run_state import read_metrics
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import AccessError, ConfigError, InfrastructureError
from services.common.telemetry.metrics import RowKind

CARD = "README.md"

Row = Mapping[str, Any]

_FILES = (".jsonl", ".json", ".csv", ".parquet", ".txt")


def card(recipe: Recipe, policy: str, step: int, rows: Iterable[Row]) -> str:
    """The README.md of a model repository. ``rows`` are those of the run's metrics."""
    section = recipe.policies[policy]
    metadata: dict[str, Any] = {"library_name": "transformers", "tags": ["rollmill", "reinforcement-learning"]}
    if _is_hub_name(section.model.path):
        metadata["base_model"] = section.model.path
    paths = {config.path for config in recipe.data.sections().values() if config.path is not None}
    datasets = sorted(path for path in paths if _is_hub_name(path))
    if datasets:
        metadata["datasets"] = datasets
    template = Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8"), trim_blocks=True)
    text: str = template.render(
        metadata=yaml.safe_dump(metadata, sort_keys=False),
        recipe=recipe,
        section=section,
        policy=policy,
        step=step,
        evaluations=_evaluations(rows, policy),
    )
    return text


def _evaluations(rows: Iterable[Row], policy: str) -> list[tuple[int, str, Row]]:
    """The first and the newest evaluation of each dataset and sampling: version, name, and results of the dataset."""
    found: dict[str, list[tuple[int, str, Row]]] = {}
    for row in rows:
        if row.get("kind") == RowKind.EVALUATION and policy in row["versions"]:
            for dataset in (found for found in row["datasets"] if found["mean_reward"] is not None):
                name = f"{dataset['name']}, {row['name'].partition('/')[2]}"
                found.setdefault(name, []).append((row["versions"][policy], name, dataset))
    table = []
    for results in found.values():
        results.sort(key=itemgetter(0))
        table += [results[0], *results[1:][-1:]]
    return table


def _is_hub_name(path: str | None) -> bool:
    """Whether a path has the form of a name on the hub, not of a file."""
    if path is None or path.startswith((".", "/", "~")):
        return False
    return path.count("/") <= 1 and not path.endswith(_FILES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pushed:
    directory: Path
    policy: str
    step: int
    url: str
    """Of the commit."""


def push_run(run_dir: Path, repository: str, policy: str | None, step: int | None, *, private: bool) -> Pushed:
    """Export a checkpoint into the run's directory, write its card beside it, and upload both as one commit.

    Raises:
        ConfigError: there is no such checkpoint, or the name is none of a repository.
        AccessError: the hub does not accept the token.
        InfrastructureError: the hub cannot be reached, or refuses; the export stays, and the command can be repeated.
    """
    api = _hub(repository)
    done = export_run(run_dir, policy, step, None)
    recipe = load_resolved(run_dir)
    text = card(recipe, done.policy, done.training_step, read_metrics(run_dir))
    (done.directory / CARD).write_text(text, encoding="utf-8")
    message = f"{recipe.run.id}: {done.policy} at training step {done.training_step}"
    url = _upload(api, repository, done.directory, message, private)
    return Pushed(directory=done.directory, policy=done.policy, step=done.training_step, url=url)


def _hub(repository: str) -> object:
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ModuleNotFoundError:
        raise ConfigError("a push needs the package huggingface_hub: pip install huggingface_hub") from None
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise ConfigError(f"{repository!r} is no name of a repository: {error}; write OWNER/NAME") from None
    if repository.count("/") != 1:
        raise ConfigError(f"{repository!r} names no owner: write OWNER/NAME")
    return HfApi()


def _client_error() -> type[Exception]:
    """The error of the HTTP client that huggingface_hub uses: which one that is depends on its version."""
    from huggingface_hub.errors import HfHubHTTPError

    found: type[Exception] = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
    return found


def _upload(api: object, repository: str, folder: Path, message: str, private: bool) -> str:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    assert isinstance(api, HfApi)
    kept = f"the export is in {folder}; run the command again"
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.upload_folder(repo_id=repository, folder_path=folder, commit_message=message)
    except LocalTokenNotFoundError:
        raise AccessError(f"{api.endpoint} needs a token: set HF_TOKEN or run `hf auth login`; {kept}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            raise AccessError(
                f"{api.endpoint} does not let this token write to {repository} ({status}): set HF_TOKEN to one that may, or run "
                f"`hf auth login`; {kept}"
            ) from None
        raise InfrastructureError(
            f"{api.endpoint} refused {repository} ({status}: {error.server_message or error}); {kept}"
        ) from None
    except (_client_error(), OSError) as error:
        raise InfrastructureError(f"{api.endpoint} cannot be reached ({error}); {kept}") from None
    return str(commit.commit_url)
