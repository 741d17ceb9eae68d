"""Commands that start runs and talk to runs in progress, those that prepare data, and the choice of the run that a command reads.

Imports stand inside the commands, so that ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.console import (
    JsonOption,
    OptionalRecipeArgument,
    ProfileOption,
    RecipeArgument,
    SetOption,
    console,
    say,
)
from services.common.net.hosts import ORCHESTRATOR

if TYPE_CHECKING:
    from services.cli.watch import OrchestratorClient


RunArgument = Annotated[
    Path | None,
    typer.Argument(help="A run directory, such as runs/quickstart-20260101-120000. Left out: the newest below ./runs."),
]


def run_or_newest(run: Path | None) -> Path | None:
    """The run that is named, else the newest below `runs`, which stderr then names; None where there is none."""
    from services.cli.inspect.standing import newest_run

    if run is None and (run := newest_run()) is not None:
        typer.echo(f"run: {run} (the newest)", err=True)
    return run


def chosen_run(run: Path | None) -> Path:
    """As ``run_or_newest``; raises ``ConfigError`` where there is none."""
    from services.common.errors import ConfigError

    found = run_or_newest(run)
    if found is None:
        raise ConfigError(
            "there is no run in ./runs: name the directory of a run, or start one with `rollmill run RECIPE`"
        )
    return found


recipe_app = typer.Typer()


@recipe_app.command()
def new(
    folder: Annotated[Path, typer.Argument(help="The folder to make, anywhere on this disk.")],
    model: Annotated[
        str | None, typer.Option(help="Your model: a directory or a hub name. Left out: a demo that trains on a CPU.")
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Your rows: a JSON Lines, JSON, CSV or Parquet file, or a hub name.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help="The column with the prompt, where it is not `problem` or alike.")
    ] = None,
    answer: Annotated[str | None, typer.Option(help="The column with the answer, where it is not `answer`.")] = None,
) -> None:
    """Write a recipe, a reward and rows into a new folder, ready to run.

    Without options it is a demo that learns on two CPU cores in half a minute. For example
    `rollmill new mine --model Qwen/Qwen3-0.6B --data rows.csv --prompt question --answer solution`.
    """
    from services.cli.new import Wanted, held_out, next_commands, write_new

    wanted = Wanted(model=model, data=data, prompt=prompt, answer=answer)
    for path in write_new(folder, wanted):
        say(console, str(path))
    if told := held_out(wanted)[1]:
        say(console, told)
    say(console, "next:")
    for command, purpose in next_commands(folder):
        say(console, f"  {command}  # {purpose}")


@recipe_app.command()
def run(
    recipe: OptionalRecipeArgument = None,
    set_: SetOption = None,
    profile: ProfileOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|auto",
            help="Go on with this run directory instead of starting a new run, with --set for settings that may change; with `auto` and a recipe, with the newest run of "
            "that recipe that has not ended, else start a new one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a recipe's processes on this node, wait until they are ready, and show the run until its end.

    Ctrl-C stops the processes that this command started. `--resume RUN` continues a run; so does `RECIPE --resume
    auto`, or the recipe's setting `run.resume: auto`.
    """
    from services.cli.doctor import NOTHING_LEARNED_EXIT, examine, tell
    from services.cli.run.directory import opened
    from services.cli.run.launch import headline
    from services.cli.run.launch import run as run_recipe
    from services.cli.watch import threshold_words, time_table
    from services.common import run_files
    from services.common.extras import provided
    from services.common.pb import run_pb2

    resolved, run_dir = opened(recipe, resume, set_ or (), profile, console)
    say(console, ": ".join(filter(None, (resolved.name, resolved.description))), "bold")
    say(console, f"run directory: {run_dir}")
    summary, picture = run_recipe(resolved, run_dir, console)
    if (threshold := summary.get("until")) is not None:
        say(console, threshold_words(run_pb2.Threshold(**threshold)))
    if picture:
        say(console, f"picture: {picture}")
    say(console, f"read its conversations: rollmill trajectories {run_dir}")
    say(console, f"see where its rollouts went: rollmill fate {run_dir}")
    if not as_json:
        for key, value in headline(summary, short=True).items():
            say(console, f"  {key:>16}  {value}")
        console.print(time_table(summary.get("time", {})))
    has_metrics = run_files.metrics(run_dir).exists()  # none when no process began
    verdict = examine(run_dir) if resolved.run.steps and has_metrics else None
    if verdict is not None:
        tell(verdict, console)
    if resolved.run.steps:
        exports = [run_files.export(run_dir, policy) for policy in resolved.policies]
        there = ", ".join(str(path) for path in exports if path.exists())
        said = f"trained model: {there}; of an earlier step" if there else "a model of a training step"
        say(console, f"{said}: rollmill export {run_dir} --step N")
        say(console, f"evaluate it: rollmill eval RECIPE --checkpoint {run_dir}")
        if "page" in provided("commands"):
            say(console, f"see all: rollmill page {run_dir}")
    if as_json:
        typer.echo(json.dumps(headline(summary)))
    if verdict is not None and verdict.nothing_learned and resolved.run.fail_when_nothing_learned:
        raise typer.Exit(NOTHING_LEARNED_EXIT)


@recipe_app.command()
def check(
    recipe: RecipeArgument,
    set_: SetOption = None,
    profile: ProfileOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved recipe.")] = False,
    solutions: Annotated[
        int,
        typer.Option(help="Run the reference solutions of so many rows of each data set of programs, in a sandbox."),
    ] = 0,
) -> None:
    """Validate a recipe and all files and modules that the recipe names. Starts processes, for a moment, for models and where
    the recipe runs programs."""
    from services.cli.check.recipe import check_recipe, describe, on_this_machine
    from services.cli.profiles import load_with_profile

    resolved = on_this_machine(load_with_profile(recipe, set_ or (), profile))
    left_out = check_recipe(resolved, solutions)
    if show:
        import yaml

        from services.common.telemetry.logs import without_passwords

        typer.echo(
            yaml.safe_dump(without_passwords(resolved.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
        )
    console.print(describe(resolved, left_out))


@recipe_app.command("eval")
def evaluate(
    recipe: RecipeArgument,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="A run directory, a Hugging Face model directory or hub name, or POLICY=PATH. May be repeated. Left out: "
            "what the recipe starts from."
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Also show the change from the newest evaluation of this run or `eval`, paired by tasks, with its interval.",
        ),
    ] = None,
    set_: SetOption = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate checkpoints on a recipe's datasets: avg@k and pass@k with 95% intervals, a table and a picture.

    For example `rollmill eval recipes/quickstart --checkpoint runs/quickstart-20260101-120000`. No policy is trained.
    Failed tasks count as wrong and are listed.
    """
    from services.cli.check.recipe import check_launch, on_this_machine
    from services.cli.console import drawn
    from services.cli.profiles import load_with_profile
    from services.cli.run.directory import prepare
    from services.cli.run.evaluate import comparable, compare, evaluation_recipe, plot_scores
    from services.cli.run.launch import run as run_recipe
    from services.cli.watch import evaluations_table
    from services.orchestrator.metrics import evaluation_values
    from services.orchestrator.progress import evaluation_to_proto

    resolved = on_this_machine(evaluation_recipe(load_with_profile(recipe, set_ or (), profile), checkpoint or ()))
    check_launch(resolved)
    base = comparable(against) if against is not None else None
    resolved, run_dir = prepare(resolved)
    say(console, resolved.name, "bold")
    say(console, f"run directory: {run_dir}")
    for name, policy in resolved.policies.items():
        say(console, f"  {name}: {policy.model.path or 'made by the recipe'}")
    summary, _ = run_recipe(resolved, run_dir, console)
    found = comparable(run_dir)
    results, left_out = list(found.values()), list[str]()
    if base is not None and against is not None:
        results, left_out = compare(found, base, against.name)
    for line in left_out:
        say(console, f"not compared with {against}: {line}", "yellow")
    console.print(evaluations_table([evaluation_to_proto(result) for result in results]))
    failed = [f"{r.name} {score.name} {task}" for r in results for score in r.datasets for task in score.failed]
    if failed:
        say(console, f"failed, and counted as wrong: {'; '.join(failed)}", "yellow")
    if picture := drawn(lambda: plot_scores(results, resolved.name, run_dir / "eval.png"), console):
        say(console, f"picture: {picture}")
    if as_json:
        evaluations = {result.name: evaluation_values(result) for result in results}
        typer.echo(json.dumps({"evaluations": evaluations, "seconds": summary["seconds"]}))


@recipe_app.command()
def resolve(
    recipe: RecipeArgument,
    run_dir: Annotated[Path, typer.Argument(help="The run directory to make.")],
    set_: SetOption = None,
    profile: ProfileOption = None,
) -> None:
    """Write the resolved recipe into a new run directory, for services that are started one by one."""
    from services.cli.plan import orchestrator_address
    from services.cli.profiles import load_with_profile
    from services.cli.run.directory import prepare
    from services.common.config.loading import RESOLVED
    from services.common.errors import ConfigError

    if (run_dir / RESOLVED).is_file():
        raise ConfigError(f"{run_dir} holds a run already: name another directory")
    overrides = [*(set_ or ()), f"run.dir={run_dir.parent}", f"run.id={run_dir.name}"]
    resolved, directory = prepare(load_with_profile(recipe, overrides, profile))
    place = orchestrator_address(resolved)
    say(console, f"{directory}: orchestrator at {place}")


@recipe_app.command()
def start(
    recipe: RecipeArgument,
    process: Annotated[
        str,
        typer.Argument(
            help="orchestrator, envgateway, inference-NAME or trainer-POLICY, as `check` lists them; or warm-start, which "
            "makes the run directory and the starting checkpoints and ends; or worlds, which makes those of a --profile and ends."
        ),
    ],
    set_: SetOption = None,
    profile: ProfileOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(envvar="RUN_DIR", help="The run's directory; left out, RUNS/RECIPE of the orchestrator."),
    ] = None,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="With envgateway: serve its environments without a run, until it is stopped."),
    ] = False,
    replica: Annotated[
        str | None,
        typer.Option(
            "--replica-id",
            help="With inference-NAME: one more replica with the settings of that service, under this name in the pool. It "
            "joins and leaves (SIGTERM) while the run goes on; a scheduler starts it again.",
        ),
    ] = None,
) -> None:
    """Start one process of a recipe and wait for its end: for split launches, and for other nodes.

    Start processes in any order, and again after any failure: the run continues. On another node, set
    ORCHESTRATOR_HOST_EXTERNAL to the host name of node 0, and ROLLMILL_KEYS to the keys that were copied from there;
    `rollmill run`, or the start of the orchestrator, prints the whole command.
    """
    from services.cli.profiles import load_with_profile
    from services.cli.run.launch import start as start_process

    start_process(
        load_with_profile(recipe, set_ or (), profile), process, run_dir, console, alone=alone, replica=replica
    )


live_app = typer.Typer()

RunningArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="The run's directory, which knows the address and has the keys, if the run has any. Left out: the newest below "
        "./runs, else --orchestrator.",
    ),
]
AddressOption = Annotated[
    str | None,
    typer.Option("--orchestrator", help="Instead of RUN: the orchestrator's HOST:PORT.", show_default=ORCHESTRATOR),
]


@live_app.command()
def status(run: RunningArgument = None, address: AddressOption = None) -> None:
    """Show the state of a run (running, finished, stopped or interrupted) and the command that goes on with the run."""
    from services.cli.inspect.standing import COMMAND, standing
    from services.cli.watch import check_answers, render
    from services.common.errors import InfrastructureError

    run, client = _reached(run, address)
    try:
        answer = check_answers(client, run)
    except InfrastructureError as error:
        if run is None:
            raise
        found = standing(run)
        for line in found.lines():
            say(console, line, wrap=line.startswith("  ") and not line.startswith(COMMAND))
        if found.held_by:
            say(console, f"  its orchestrator does not answer: {error.message}", "yellow")
        return
    console.print(render(answer.progress, title=answer.run_id))
    say(console, f"run directory: {answer.run_dir}")


@live_app.command()
def watch(run: RunningArgument = None, address: AddressOption = None) -> None:
    """Follow a run until its end; Ctrl-C stops watching, not the run."""
    from services.cli.watch import ProgressView, check_answers, follow

    run, client = _reached(run, address)
    with ProgressView(console, check_answers(client, run).run_id) as view:
        follow(client, view)


@live_app.command()
def pause(run: RunningArgument = None, address: AddressOption = None) -> None:
    """Issue no further tasks and start no further training step, until `rollmill resume`."""
    _answering(*_reached(run, address)).pause()
    console.print("paused; go on with `rollmill resume`")


@live_app.command()
def resume(run: RunningArgument = None, address: AddressOption = None) -> None:
    """Continue after `rollmill pause`. To continue a run whose processes have ended, use `rollmill run --resume RUN`."""
    _answering(*_reached(run, address)).resume()
    console.print("going on")


@live_app.command()
def stop(run: RunningArgument = None, address: AddressOption = None) -> None:
    """End a run for good: trainers write a checkpoint and exit, replicas finish their rollouts.

    To continue the run later, stop `rollmill run` with Ctrl-C instead, then use `rollmill run --resume RUN`.
    """
    from services.cli.inspect.standing import RUNNING, standing
    from services.common.errors import InfrastructureError

    run, client = _reached(run, address)
    try:
        _answering(run, client).stop("rollmill stop")
    except InfrastructureError:
        if run is None or (found := standing(run)).state == RUNNING:
            raise
        say(console, "nothing to stop: " + "\n".join(found.lines()))
        return
    console.print("stopping")


def _reached(run: Path | None, address: str | None) -> tuple[Path | None, OrchestratorClient]:
    """The run that is named, else the newest one unless an address is given, and its orchestrator."""
    from services.cli.watch import reach

    run = run if address is not None else run_or_newest(run)
    return run, reach(run, address)


def _answering(run: Path | None, client: OrchestratorClient) -> OrchestratorClient:
    """The client, after the orchestrator has answered for ``run`` and not for another one."""
    from services.cli.watch import check_answers

    check_answers(client, run)
    return client
