"""``rollmill eval``: evaluate checkpoints with a recipe's datasets, workflow and sampling, without training.

The same processes as a run but the trainers: replicas serve the checkpoints as version 0. Results are a table, a
picture and ``summary.json`` in a run directory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

from services.cli.check.models import check_model_name, model_instead
from services.cli.console import Column, FittingTable, format_change, format_reward, pyplot
from services.cli.inspect.checkpoints import export_run, policies_of
from services.cli.inspect.run_model import open_journal
from services.cli.inspect.run_state import check_run_directory
from services.common import run_files
from services.common.config.loading import RESOLVED, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.telemetry.metrics import EstimateSummary, EvaluationSummary
from services.orchestrator.evaluation import kind_of
from services.orchestrator.journal import entries
from services.orchestrator.journal.entries import Estimate, EvaluationResult, compared, overall_difference


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
    evaluations: Mapping[str, EvaluationSummary],
    found: Mapping[str, EvaluationResult],
    base: Mapping[str, EvaluationResult],
    run: str,
) -> list[str]:
    """Write the difference between ``found`` and ``base``, the evaluations of ``run``, into the results of
    ``summary.json``; also the evaluations that cannot be compared, and why."""
    left: list[str] = []
    for name, values in evaluations.items():
        kind = kind_of(name)
        if kind not in base:
            left.append(f"{kind}: there is only {', '.join(base)}")
            continue
        scores = compared(base[kind].datasets, found[kind].datasets)
        left += [
            f"{kind} {score.name}: its tasks are others, it has one alone, or every rollout failed"
            for score in scores
            if score.difference is None
        ]
        overall = overall_difference(base[kind].datasets, found[kind].datasets)
        values["compared_with"], values["difference"] = f"{run} {base[kind].name}", _plain(overall)
        for one, score in zip(values["datasets"], scores, strict=True):
            one["difference"] = _plain(score.difference)
    return left


def _plain(estimate: Estimate | None) -> EstimateSummary | None:
    return None if estimate is None else {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def scores_table(evaluations: Mapping[str, EvaluationSummary]) -> FittingTable:
    """Results of ``summary.json`` by pass and dataset, in hundredths; with the change where they were compared."""
    was_compared = any(result.get("compared_with") for result in evaluations.values())
    columns = [Column("sampling"), Column("dataset"), Column("avg@k", "right"), Column("95%", "right")]
    columns += [Column("change (95%)", "right")] if was_compared else []
    columns += [Column("pass@k", spare=1), Column("tasks", "right", 3), Column("failed", "right", 2)]
    table = FittingTable(columns, box=None)
    for name, result in evaluations.items():
        label = name.partition("/")[2]
        for found in result["datasets"]:
            reward, samples = found["mean_reward"], found["samples_per_item"]
            table.add_row(
                *(label, found["name"], f"{100 * reward['value']:.1f} (k={samples})" if reward else "-"),
                f"{100 * reward['low']:.1f}-{100 * reward['high']:.1f}" if reward else "",
                *([_change(found["difference"])] if was_compared else []),
                "  ".join(f"@{k} {100 * share['value']:.1f}" for k, share in found["pass_at"].items()),
                *(str(found["num_items"]), str(len(found["failed"]))),
            )
            label = ""
        if len(result["datasets"]) > 1:
            total = sum(found["num_items"] for found in result["datasets"])
            change = (_change(result["difference"]),) if was_compared else ()
            mean = result["mean_reward"]
            told = format_reward(None if mean is None else 100 * mean, digits=1)
            table.add_row("", "overall", told, "", *change, "", str(total), "")
    return table


def _change(difference: EstimateSummary | None) -> str:
    if difference is None:
        return ""
    return format_change(100 * difference["value"], 100 * difference["low"], 100 * difference["high"], digits=1)


def failed_items(evaluations: Mapping[str, EvaluationSummary]) -> list[str]:
    """Tasks that count as wrong because they failed: "pass dataset task"."""
    return [
        f"{name} {found['name']} {task}"
        for name, result in evaluations.items()
        for found in result["datasets"]
        for task in found["failed"]
    ]


def plot_scores(evaluations: Mapping[str, EvaluationSummary], title: str, output: Path) -> Path:
    """A bar for each dataset and pass, with its 95% interval; above it the change, where they were compared."""
    names = list(dict.fromkeys(f["name"] for result in evaluations.values() for f in result["datasets"]))
    plt = pyplot()
    figure, ax = plt.subplots(figsize=(max(5.0, 1.6 * len(names) + 2), 4), layout="constrained")
    width = 0.8 / max(1, len(evaluations))
    for number, (name, result) in enumerate(evaluations.items()):
        found = [
            (each["name"], mean, each["difference"]) for each in result["datasets"] if (mean := each["mean_reward"])
        ]
        places = [names.index(dataset) + (number - (len(evaluations) - 1) / 2) * width for dataset, *_ in found]
        values = [100 * mean["value"] for _, mean, _ in found]
        errors = [
            [100 * (m["value"] - m["low"]) for _, m, _ in found],
            [100 * (m["high"] - m["value"]) for _, m, _ in found],
        ]
        bars = ax.bar(places, values, width * 0.92, yerr=errors, capsize=3, label=name.partition("/")[2])
        ax.bar_label(bars, fmt="%.1f", fontsize=8, label_type="center", color="white")
        ax.bar_label(bars, labels=[_change(difference) for *_, difference in found], fontsize=8, padding=3)
    ax.set_xticks(range(len(names)), names)
    ax.set_ylabel("avg@k (95%)")
    ax.set_ylim(0, max(100.0, ax.get_ylim()[1]))
    ax.set_title(title, fontsize=11)
    ax.legend(fontsize=8, loc="lower right")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=110)
    plt.close(figure)
    return output
