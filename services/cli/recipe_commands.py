"""Commands that begin with a recipe: run it, check it, evaluate with it, or start its processes elsewhere.

What a command needs is imported when it runs: ``--help`` and a wrong option answer at once.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from services.cli.options import JsonOption, ProfileOption, RecipeArgument, SetOption, console

recipe_app = typer.Typer()


@recipe_app.command()
def run(
    recipe: Annotated[Path | None, typer.Argument(help="A recipe.yaml, or a directory that holds one.")] = None,
    set_: SetOption = None,
    profile: ProfileOption = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|auto",
            help="Go on with this run directory instead of starting a new run; with `auto` and a recipe, with the newest run of "
            "that recipe that has not ended, else start a new one.",
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Start a recipe's processes on this node, wait on their health, and show the run until it ends.

    Ctrl-C stops exactly what was started; `--resume RUN` goes on where it stood, and so does `RECIPE --resume auto`, or the
    recipe's setting `run.resume: auto`.
    """
    from services.cli.check import check_named
    from services.cli.launch_checks import check_launch
    from services.cli.profiles import load_with_profile
    from services.cli.resume import AUTO, choose
    from services.cli.run import headline
    from services.cli.run import run as run_recipe
    from services.cli.run_directory import prepare, reopen
    from services.cli.time_table import time_table
    from services.common.errors import ConfigError

    if (recipe is None) != (resume not in (None, AUTO)):
        raise ConfigError(
            "name a recipe to start a run (with --resume auto to go on with its newest one that has not ended), or --resume RUN "
            "to go on with one; not both"
        )
    if recipe is None:
        if set_ or profile:
            raise ConfigError(
                "a run that goes on keeps its recipe: leave out --set and --profile, or start another run"
            )
        resolved, run_dir = reopen(Path(str(resume)), console)
    else:
        loaded = load_with_profile(recipe, set_ or (), profile)
        choice = choose(loaded, asked=resume == AUTO)
        if choice.told:
            console.print(choice.told, highlight=False, soft_wrap=True, markup=False)
        if choice.run_dir is not None:
            resolved, run_dir = reopen(choice.run_dir, console)
        else:
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
    console.print(f"see where its rollouts went: millrace fate {run_dir}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps(headline(outcome.summary)))
    else:
        for key, value in headline(outcome.summary).items():
            console.print(f"  {key:>16}  {value}", highlight=False)
        console.print(time_table(outcome.summary.get("time", {})))


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
    """Validate a recipe and everything it names, without starting anything but --solutions."""
    from services.cli.check import check_recipe, describe
    from services.cli.profiles import load_with_profile

    resolved = load_with_profile(recipe, set_ or (), profile)
    left_out = check_recipe(resolved, solutions)
    if show:
        import yaml

        from services.common.redaction import without_passwords

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
            help="Also tell the change from the newest evaluation of this run or `eval`, paired by tasks, with its interval.",
        ),
    ] = None,
    set_: SetOption = None,
    profile: ProfileOption = None,
    as_json: JsonOption = False,
) -> None:
    """Evaluate checkpoints on a recipe's datasets: avg@k and pass@k with 95% intervals, a table and a picture.

    For example `millrace eval recipes/quickstart --checkpoint runs/quickstart-20260101-120000`. Nothing is trained. Failed
    tasks count as wrong and are listed.
    """
    from services.cli.drawing import drawn
    from services.cli.evaluate import comparable, compare, evaluation_recipe, failed_items, plot_scores, scores_table
    from services.cli.launch_checks import check_launch
    from services.cli.profiles import load_with_profile
    from services.cli.run import run as run_recipe
    from services.cli.run_directory import prepare

    resolved = evaluation_recipe(load_with_profile(recipe, set_ or (), profile), checkpoint or ())
    check_launch(resolved)
    base = comparable(against) if against is not None else None
    resolved, run_dir = prepare(resolved)
    console.print(f"[bold]{resolved.name}[/bold]\nrun directory: {run_dir}", highlight=False)
    for name, policy in resolved.policies.items():
        console.print(f"  {name}: {policy.model.path or 'made by the recipe'}", highlight=False, soft_wrap=True)
    outcome = run_recipe(resolved, run_dir, console)
    evaluations = outcome.summary["evaluations"]
    if base is not None and against is not None:
        for line in compare(evaluations, comparable(run_dir), base, against.name):
            console.print(f"not compared with {against}: {line}", style="yellow", soft_wrap=True, markup=False)
    console.print(scores_table(evaluations))
    if failed := failed_items(evaluations):
        console.print(f"failed, and counted as wrong: {'; '.join(failed)}", style="yellow", soft_wrap=True)
    if picture := drawn(lambda: plot_scores(evaluations, resolved.name, run_dir / "eval.png"), console):
        console.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    if as_json:
        typer.echo(json.dumps({"evaluations": evaluations, "seconds": outcome.summary["seconds"]}))


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
    from services.cli.run_directory import prepare
    from services.common.config.loading import RESOLVED
    from services.common.errors import ConfigError

    if (run_dir / RESOLVED).is_file():
        raise ConfigError(f"{run_dir} holds a run already: name another directory")
    overrides = [*(set_ or ()), f"run.dir={run_dir.parent}", f"run.id={run_dir.name}"]
    resolved, directory = prepare(load_with_profile(recipe, overrides, profile))
    place = orchestrator_address(resolved)
    console.print(f"{directory}: orchestrator at {place}", highlight=False, soft_wrap=True, markup=False)


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
) -> None:
    """Start one process of a recipe and stay until it ends: for split launches, and for other nodes.

    Start them in any order, and again after whatever ended them: the run goes on. On another node, set
    ORCHESTRATOR_HOST_EXTERNAL to the host name of node 0, and MILLRACE_KEYS to the keys that were copied from there;
    `millrace run`, or the start of the orchestrator, prints the whole command.
    """
    from services.cli.profiles import load_with_profile
    from services.cli.start import start as start_process

    start_process(load_with_profile(recipe, set_ or (), profile), process, run_dir, console, alone=alone)


@recipe_app.command()
def deploy(
    recipe: RecipeArgument,
    target: Annotated[
        Literal["compose", "scripts"],
        typer.Option(help="`compose`: containers, a file for each node. `scripts`: processes, a script for each."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The directory to write to.")],
    set_: SetOption = None,
    profile: ProfileOption = None,
) -> None:
    """Write the compose files or the launch scripts of a recipe, from the resolved recipe (docs/deploy.md)."""
    from services.cli.deploy.command import deploy as write_deployment

    for path in write_deployment(recipe, target, output, set_ or (), profile):
        console.print(str(path), highlight=False, soft_wrap=True)
