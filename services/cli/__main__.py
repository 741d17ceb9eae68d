"""The ``millrace`` command: start, check, watch and read runs."""

from __future__ import annotations

import json
import logging
import os
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.console import Console

from services.cli.data_commands import data_app
from services.cli.keys import keys_app
from services.common.errors import MillraceError
from services.common.hosts import ORCHESTRATOR

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode="markdown",
    help="Asynchronous reinforcement learning for LLM agents.\n\n"
    "Begin with `millrace run recipes/quickstart`: it trains a small model on this machine in minutes.",
)
app.add_typer(data_app, name="data")
app.add_typer(keys_app, name="keys")
console = Console()
errors = Console(stderr=True)

RecipeArgument = Annotated[Path, typer.Argument(help="A recipe.yaml, or a directory that holds one.")]
RunArgument = Annotated[Path, typer.Argument(help="A run directory, such as runs/quickstart-20260101-120000.")]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", help="Override a setting, e.g. `--set run.steps=20`. May be repeated.")
]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Transform the recipe as a whole: `tiny` tries it on two CPU cores.")
]
RunningArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="RUN",
        help="The run's directory, which knows the address and has the keys, if the run has any. Left out: --orchestrator.",
    ),
]
RunOption = Annotated[Path | None, typer.Option("--run", hidden=True, help="The same as the argument RUN.")]
AddressOption = Annotated[
    str | None,
    typer.Option("--orchestrator", help="Instead of RUN: the orchestrator's HOST:PORT.", show_default=ORCHESTRATOR),
]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version("millrace"))
        raise typer.Exit


@app.callback()
def millrace(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe.yaml, or a directory that holds one.")] = None,
    set_: SetOption = None,
    profile: ProfileOption = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run directory instead of starting a new run.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object on the last line.")
    ] = False,
) -> None:
    """Start a recipe's processes on this node, wait on their health, and show the run until it ends.

    Ctrl-C stops exactly what was started; `--resume RUN` goes on where it stood.
    """
    from services.cli.check import check_named
    from services.cli.launch_checks import check_launch
    from services.cli.profiles import load_with_profile
    from services.cli.run import headline, prepare, reopen
    from services.cli.run import run as run_recipe
    from services.cli.time_table import time_table
    from services.common.errors import ConfigError

    if (recipe is None) == (resume is None):
        raise ConfigError("name a recipe to start a run, or --resume RUN to go on with one; not both")
    if resume is not None:
        if set_ or profile:
            raise ConfigError(
                "a run that goes on keeps its recipe: leave out --set and --profile, or start another run"
            )
        resolved, run_dir = reopen(resume)
    else:
        loaded = load_with_profile(Path(str(recipe)), set_ or (), profile)
        check_launch(loaded)
        check_named(loaded)
        resolved, run_dir = prepare(loaded)
    console.print(
        f"[bold]{resolved.name}[/bold]: {resolved.description}\nrun directory: {run_dir}",
        highlight=False,
        soft_wrap=True,
    )
    outcome = run_recipe(resolved, run_dir, console)
    if outcome.picture:
        console.print(f"picture: {outcome.picture}", highlight=False, soft_wrap=True)
    console.print(f"read what it wrote: millrace trajectories {run_dir}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(headline(outcome.summary)))
    else:
        for key, value in headline(outcome.summary).items():
            console.print(f"  {key:>16}  {value}", highlight=False)
        console.print(time_table(outcome.summary.get("time", {})))


@app.command()
def check(
    recipe: RecipeArgument,
    set_: SetOption = None,
    profile: ProfileOption = None,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved recipe.")] = False,
) -> None:
    """Validate a recipe and everything it names, without starting anything."""
    from services.cli.check import check_recipe, describe
    from services.cli.profiles import load_with_profile

    resolved = load_with_profile(recipe, set_ or (), profile)
    check_recipe(resolved)
    if show:
        import yaml

        from services.common.redaction import without_passwords

        typer.echo(
            yaml.safe_dump(without_passwords(resolved.model_dump(mode="json")), sort_keys=False, allow_unicode=True)
        )
    console.print(describe(resolved))


@app.command("eval")
def evaluate(
    recipe: RecipeArgument,
    checkpoint: Annotated[
        list[str] | None,
        typer.Option(
            help="A run directory, a Hugging Face model directory or hub name, or POLICY=PATH. May be repeated. Left out: "
            "what the recipe starts from."
        ),
    ] = None,
    set_: SetOption = None,
    profile: ProfileOption = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the results as one JSON object on the last line.")
    ] = False,
) -> None:
    """Evaluate checkpoints on a recipe's datasets: avg@k and pass@k with 95% intervals, a table and a picture.

    For example `millrace eval recipes/quickstart --checkpoint runs/quickstart-20260101-120000`. Nothing is trained. Failed
    tasks count as wrong and are listed.
    """
    from services.cli.evaluate import evaluation_recipe, failed_items, plot_scores, scores_table
    from services.cli.launch_checks import check_launch
    from services.cli.profiles import load_with_profile
    from services.cli.run import prepare
    from services.cli.run import run as run_recipe

    resolved = evaluation_recipe(load_with_profile(recipe, set_ or (), profile), checkpoint or ())
    check_launch(resolved)
    resolved, run_dir = prepare(resolved)
    console.print(f"[bold]{resolved.name}[/bold]\nrun directory: {run_dir}", highlight=False)
    for name, policy in resolved.policies.items():
        console.print(f"  {name}: {policy.model.path or 'made by the recipe'}", highlight=False, soft_wrap=True)
    outcome = run_recipe(resolved, run_dir, console)
    evaluations = outcome.summary["evaluations"]
    console.print(scores_table(evaluations))
    if failed := failed_items(evaluations):
        console.print(f"failed, and counted as wrong: {'; '.join(failed)}", style="yellow", soft_wrap=True)
    picture = plot_scores(evaluations, resolved.name, run_dir / "eval.png")
    console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"evaluations": evaluations, "seconds": outcome.summary["seconds"]}))


@app.command()
def resolve(
    recipe: RecipeArgument,
    run_dir: Annotated[Path, typer.Argument(help="The run directory to make.")],
    set_: SetOption = None,
    profile: ProfileOption = None,
) -> None:
    """Write the resolved recipe into a new run directory, for services that are started one by one."""
    from services.cli.plan import orchestrator_address
    from services.cli.profiles import load_with_profile
    from services.cli.run import prepare
    from services.common.config.loading import RESOLVED
    from services.common.errors import ConfigError

    if (run_dir / RESOLVED).is_file():
        raise ConfigError(f"{run_dir} holds a run already: name another directory")
    overrides = [*(set_ or ()), f"run.dir={run_dir.parent}", f"run.id={run_dir.name}"]
    resolved, directory = prepare(load_with_profile(recipe, overrides, profile))
    place = orchestrator_address(resolved)
    console.print(f"{directory}: orchestrator at {place}", highlight=False, soft_wrap=True, markup=False)


@app.command()
def start(
    recipe: RecipeArgument,
    process: Annotated[
        str,
        typer.Argument(
            help="orchestrator, envgateway, inference-NAME or trainer-POLICY, as `check` lists them; or warm-start, which "
            "makes the run directory and the starting checkpoints and ends."
        ),
    ],
    set_: SetOption = None,
    profile: ProfileOption = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(envvar="RUN_DIR", help="The run's directory; left out, RUNS/RECIPE of the orchestrator."),
    ] = None,
) -> None:
    """Start one process of a recipe and stay until it ends: for split launches, and for other nodes.

    Start them in any order, and again after whatever ended them: the run goes on. On another node, set
    ORCHESTRATOR_HOST_EXTERNAL to the host name of node 0, and MILLRACE_KEYS to the keys that were copied from there;
    `millrace run`, or the start of the orchestrator, prints the whole command.
    """
    from services.cli.profiles import load_with_profile
    from services.cli.start import start as start_process

    start_process(load_with_profile(recipe, set_ or (), profile), process, run_dir, console)


@app.command()
def deploy(
    recipe: RecipeArgument,
    target: Annotated[
        Literal["compose", "scripts"],
        typer.Option(help="`compose`: containers on one machine. `scripts`: processes on every node of the recipe."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write to.")] = Path("deploy"),
    set_: SetOption = None,
) -> None:
    """Write the compose files or the launch scripts of a recipe, from the resolved recipe (docs/deploy.md)."""
    from services.cli.deploy.command import deploy as write_deployment

    for path in write_deployment(recipe, target, output, set_ or ()):
        console.print(str(path), highlight=False, soft_wrap=True)


@app.command()
def status(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Where a run stands now."""
    from services.cli.progress_view import render
    from services.cli.reach import reach

    answer = reach(run or named, address).get_run()
    console.print(render(answer.progress, title=answer.run_id))
    console.print(f"run directory: {answer.run_dir}", highlight=False, soft_wrap=True)


@app.command()
def watch(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Follow a run until it ends; Ctrl-C stops watching, not the run."""
    from services.cli.follow import follow
    from services.cli.progress_view import ProgressView
    from services.cli.reach import reach

    client = reach(run or named, address)
    with ProgressView(console, client.get_run().run_id) as view:
        follow(client, view)


@app.command()
def pause(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Issue no further tasks and start no further training step, until `millrace resume`."""
    from services.cli.reach import reach

    reach(run or named, address).pause()
    console.print("paused; go on with `millrace resume`")


@app.command()
def resume(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """Go on after `millrace pause`. A run whose processes have ended goes on with `millrace run --resume RUN`."""
    from services.cli.reach import reach

    reach(run or named, address).resume()
    console.print("going on")


@app.command()
def stop(run: RunningArgument = None, address: AddressOption = None, named: RunOption = None) -> None:
    """End a run for good: trainers write a checkpoint and leave, replicas finish what they play.

    To go on with it later, stop `millrace run` with Ctrl-C instead, then `millrace run --resume RUN`.
    """
    from services.cli.reach import reach

    reach(run or named, address).stop("millrace stop")
    console.print("stopping")


@app.command()
def plot(
    runs: Annotated[list[Path], typer.Argument(help="Run directories; several are drawn on one picture.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Where to write the PNG; left out, run.png in the run's directory, or runs.png here for several.",
        ),
    ] = None,
) -> None:
    """Draw rewards, response length, staleness, throughput and idle shares into a PNG."""
    from services.cli.plot import plot_runs
    from services.common.errors import ConfigError

    target = output or (runs[0] / "run.png" if len(runs) == 1 else Path("runs.png"))
    if plot_runs(runs, target) is None:
        raise ConfigError("no training step has finished yet: nothing to draw")
    console.print(str(target), highlight=False, soft_wrap=True)


@app.command()
def trajectories(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many, counted from the newest.", min=1)] = 5,
    group: Annotated[str | None, typer.Option(help="Only this task group.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Only rewards of at least this.")] = None,
    max_reward: Annotated[float | None, typer.Option(help="Only rewards of at most this.")] = None,
) -> None:
    """Read real conversations: what the policy wrote in green, what it read in grey."""
    from services.cli.trajectories import read_trajectories, show

    rows = read_trajectories(run, last=last, group=group, min_reward=min_reward, max_reward=max_reward)
    if not rows:
        console.print("no trajectory matches: `millrace trace RUN --list` shows task groups", markup=False)
    show(run, rows, console)


@app.command()
def weights(
    run: RunArgument,
    last: Annotated[int, typer.Option(help="How many transfers to list, counted from the newest.", min=1)] = 10,
    policy: Annotated[str | None, typer.Option(help="Only this policy.")] = None,
    replica: Annotated[str | None, typer.Option(help="Only this replica.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw them into this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary and every transfer as JSON.")] = False,
) -> None:
    """How weight versions reached the replicas: full or delta, bytes, bits per changed element, seconds per stage, pause."""
    from services.cli.weights import plot_transfers, read_transfers, show, summarise

    rows = read_transfers(run, policy=policy, replica=replica)
    if as_json:
        typer.echo(json.dumps({"replicas": summarise(rows), "transfers": rows}))
    else:
        show(rows, console, last)
    if output is not None:
        picture = plot_transfers(rows, output)
        if not as_json:
            console.print(f"picture: {picture}", highlight=False, soft_wrap=True)


@app.command()
def trace(
    run: RunArgument,
    group: Annotated[str | None, typer.Argument(help="A task group, as --list shows them.")] = None,
    phases: Annotated[bool, typer.Option("--phases", help="Also every phase of every rollout.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Also draw it into this PNG.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="List task groups instead, the newest last.")] = False,
    order: Annotated[Literal["newest", "slowest"], typer.Option("--sort", help="The order of --list.")] = "newest",
    state: Annotated[
        str | None, typer.Option("--status", help="Of --list, only these, e.g. trained, filtered, failed, running.")
    ] = None,
    step: Annotated[int | None, typer.Option(help="Of --list, only what was trained in this step.", min=0)] = None,
    last: Annotated[int, typer.Option(help="How many to list.", min=1)] = 20,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """What happened to a task group, from the prompt to the gradient: who had it when, what it did, what it waited for.

    Needs the run directory alone: while the run goes on, after it, and after any of its processes was killed.
    """
    from services.cli.trace.command import list_groups, show_group
    from services.common.errors import ConfigError

    if list_ or group is None:
        if output is not None:
            raise ConfigError("name the task group to draw: millrace trace RUN GROUP -o FILE.png")
        list_groups(run, console, order=order, state=state, step=step, last=last, as_json=as_json)
    else:
        show_group(run, group, console, phases=phases, output=output, as_json=as_json)


@app.command()
def replay(
    run: RunArgument,
    step: Annotated[int, typer.Option(help="The training step to train again.", min=1)],
    policy: Annotated[str | None, typer.Option(help="The policy; left out when the run has one.")] = None,
) -> None:
    """Train a recorded batch again, offline, from the checkpoint before it, and compare the weights with the ledger."""
    from services.cli.replay import replay_step

    console.print_json(json.dumps(replay_step(run, policy, step)))


def main() -> None:
    """Entry point: errors of ours are told in words, with exit code 2 for the user's and 1 for the rest."""
    os.environ.setdefault(
        "GRPC_VERBOSITY", "ERROR"
    )  # read when grpc is imported; failed handshakes are told in our words
    import structlog

    from services.cli.errors import Interrupted, exit_code, tell

    # What commands do in this process is told in their own words; `run` sets up logs of its own.
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    try:
        app(standalone_mode=True)
    except MillraceError as error:
        tell(error, errors)
        raise SystemExit(exit_code(error)) from None
    except Interrupted as interruption:
        errors.print(str(interruption), soft_wrap=True)
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
