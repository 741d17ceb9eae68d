"""``rollmill eval``: evaluate checkpoints with a recipe's datasets, workflow and sampling, without training.

The same processes as a run but the trainers: replicas serve the checkpoints as version 0. Results are a table, a
picture and ``summary.json`` in a run directory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from services.cli.check.models import check_model_name, model_instead
from services.cli.console import format_change, pyplot
from services.cli.inspect.checkpoints import export_run, policies_of
from services.cli.inspect.run_model import open_journal
from services.cli.inspect.run_state import check_run_directory
from services.common import run_files
from services.common.config.loading import RESOLVED, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.orchestrator.evaluation import kind_of
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import EvaluationResult, compared, overall_difference


def evaluation_recipe(recipe: Recipe, checkpoints: Sequence[str]) -> Recipe:
    """The recipe without training, its policies at these checkpoints.

    ``checkpoints``: a run directory (its final or newest durable weights are taken), a Hugging Face directory or hub name for the only policy
    that plays, or ``policy=path``. A policy without one has the weights of the recipe's start.

    Raises:
        ConfigError: a checkpoint that is none, for no policy, or for one of several without saying which.
    """
    if not recipe.data.evaluation:
        raise ConfigError(f"{recipe.name} has no data.evaluation, so there are no tasks to evaluate on")
    tree = recipe.model_dump(mode="json")
    for policy, path in _by_policy(recipe, checkpoints).items():
        tree["policies"][policy]["model"]["path"] = path
        tree["warm_start"].pop(policy, None)
    for section in tree["policies"].values():
        section["adapter"] = None  # a run exports it merged, and at the start it computes as its base
    tree["run"] |= {"steps": 0, "until": None}
    tree["name"] = f"{recipe.name}-eval"
    tree["evaluation"] |= {"at_start": True, "at_end": False, "every": 0}
    return validate(tree, source=f"the evaluation of {recipe.name}")


def _by_policy(recipe: Recipe, checkpoints: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    playing = recipe.evaluation.policies or recipe.playing_policies
    for checkpoint in checkpoints:
        policy, equals, path = checkpoint.partition("=")
        path = str(Path(path).expanduser()) if path.startswith("~/") else path
        if equals and policy in recipe.policies:
            found[policy] = _of_run(Path(path), policy) if _is_run(path) else _checked(path)
        elif _is_run(checkpoint):
            found |= _all_of_run(recipe, Path(checkpoint))
        elif equals:
            raise ConfigError(
                f"--checkpoint {checkpoint}: no policy {policy!r}; there are {', '.join(recipe.policies)}"
            )
        elif len(playing) == 1:
            found[playing[0]] = _checked(checkpoint)
        else:
            raise ConfigError(
                f"--checkpoint {checkpoint}: {', '.join(playing)} play; write POLICY=PATH for each, or a run directory"
            )
    return found


def _is_run(path: str) -> bool:
    return (Path(path) / RESOLVED).is_file() or (Path(path) / "export").is_dir()


def _all_of_run(recipe: Recipe, run_dir: Path) -> dict[str, str]:
    """The weights of each policy of the recipe that the run has any of; raises ``ConfigError`` where it has none."""
    exported = [name for name in recipe.policies if run_files.export(run_dir, name).is_dir()]
    kept = policies_of(run_dir) if (run_dir / RESOLVED).is_file() else []
    there = [name for name in recipe.policies if name in (*exported, *kept)]
    if not there:
        raise ConfigError(
            f"--checkpoint {run_dir}: the run has no weights yet of {', '.join(recipe.policies)}: the first come at "
            "policies.<name>.trainer.checkpoint_every"
        )
    return {name: _of_run(run_dir, name) for name in there}


def _of_run(run_dir: Path, policy: str) -> str:
    """The weights of a policy in a run, as a Hugging Face directory: the final ones, else those of the newest durable
    checkpoint, which are exported for it. The run may be finished, interrupted or running."""
    final = run_files.export(run_dir, policy)
    if (final / "config.json").is_file():
        return str(final.resolve())
    return str(export_run(run_dir, policy, None, None).directory.resolve())


def _checked(path: str) -> str:
    """Local checkpoints must be there; anything else is a hub name, which is looked up at once."""
    if Path(path).is_dir():
        if not (Path(path) / "config.json").is_file():
            raise ConfigError(f"{path} holds no config.json: {model_instead(Path(path))}")
        return str(Path(path).resolve())
    if any(Path(path).parent.glob(f"*/{RESOLVED}")):  # a folder of runs, and no owner on the hub
        check_run_directory(Path(path))
    if path.startswith(("/", ".", "~")):
        raise ConfigError(f"{path} does not exist: write a model directory, a run directory, or a hub name")
    check_model_name("--checkpoint", path)
    return path


def comparable(run_dir: Path) -> dict[str, EvaluationResult]:
    """The newest evaluation of each kind in a run, by kind.

    Raises:
        ConfigError: no run directory, or a run without a finished evaluation.
    """
    with closing(open_journal(run_dir)) as reader:
        rows = [record for row in reader.rows_of(entries.EVALUATION) if (record := reader.load(row)) is not None]
    if not rows:
        raise ConfigError(f"{run_dir} has no finished evaluation to compare with")
    results = (entries.from_json(EvaluationResult, row) for row in rows)
    return {kind_of(result.name): result for result in results}


def compare(
    found: Mapping[str, EvaluationResult], base: Mapping[str, EvaluationResult], run: str
) -> tuple[list[EvaluationResult], list[str]]:
    """The evaluations ``found`` with their differences to ``base``, the evaluations of ``run``; also those that cannot be
    compared, and why."""
    results, left = [], []
    for kind, result in found.items():
        if kind not in base:
            left.append(f"{kind}: there is only {', '.join(base)}")
            results.append(result)
            continue
        scores = compared(base[kind].datasets, result.datasets)
        left += [
            f"{kind} {score.name}: its tasks are others, it has one alone, or every rollout failed"
            for score in scores
            if score.difference is None
        ]
        overall = overall_difference(base[kind].datasets, result.datasets)
        told = f"{run} {base[kind].name}"
        results.append(replace(result, datasets=scores, compared_with=told, difference=overall))
    return results, left


def plot_scores(results: Sequence[EvaluationResult], title: str, output: Path) -> Path:
    """A bar for each dataset and pass, with its 95% interval; above it the change, where they were compared."""
    names = list(dict.fromkeys(score.name for result in results for score in result.datasets))
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(max(5.0, 1.6 * len(names) + 2), 4), layout="constrained")
    width = 0.8 / max(1, len(results))
    for number, result in enumerate(results):
        found = [(score, mean) for score in result.datasets if (mean := score.mean_reward)]
        places = [names.index(score.name) + (number - (len(results) - 1) / 2) * width for score, _ in found]
        errors = [[mean.value - mean.low for _, mean in found], [mean.high - mean.value for _, mean in found]]
        values = [mean.value for _, mean in found]
        bars = ax.bar(places, values, width * 0.92, yerr=errors, capsize=3, label=kind_of(result.name))
        changes = [format_change(d.value, d.low, d.high) if (d := score.difference) else "" for score, _ in found]
        ax.bar_label(bars, fmt="%.3f", fontsize=8, label_type="center", color="white")
        ax.bar_label(bars, labels=changes, fontsize=8, padding=3)
    ax.set_xticks(range(len(names)), names)
    ax.set_ylabel("mean reward (95%)")
    ax.set_ylim(0, max(1.0, ax.get_ylim()[1]))
    ax.set_title(title, fontsize=11)
    ax.legend(fontsize=8, loc="lower right")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return output
