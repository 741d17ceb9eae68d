"""``millrace check``: everything that can be known to be wrong before a process starts.

The schema is checked by loading; here it is what the recipe names: data, workflow, rewards, models, ports, and whether
it fits into the GPUs. What this machine must have besides, to run it, is ``launch_checks``: shown here, refused by
`millrace run`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.launch_checks import launch_problems
from services.cli.memory_estimate import GIB, estimates, misfits
from services.cli.model_files import model_problems
from services.cli.plan import orchestrator_address, plan, ports_in_use
from services.cli.world_checks import index_problems
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.losses import LossByPath
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, MillraceError
from services.common.importing import check_can_be_loaded, load_object

if TYPE_CHECKING:
    from services.orchestrator.datasets import TaskSource


def check_recipe(recipe: Recipe, num_solutions: int = 0) -> list[str]:
    """What is worth knowing of data that is here, a line for each dataset: rows that are left out, evaluation tasks that
    stand in the training data, and what ``num_solutions`` reference solutions of each show.

    Raises:
        ConfigError: one line per problem: what is wrong, where, and what to write.
    """
    left_out: list[str] = []
    sources: dict[str, TaskSource] = {}
    named = _named_problems(recipe, left_out, sources)
    found = [*ports_in_use(recipe), *misfits(recipe), *model_problems(recipe), *index_problems(recipe)]
    _refuse(recipe, [*found, *named])
    from services.cli.overlap import overlap_lines

    told = [*left_out, *overlap_lines(recipe, sources)]
    if num_solutions:
        from services.cli.solutions import solution_lines

        gateway = recipe.envgateway or EnvGatewayConfig()
        told += solution_lines(sources, gateway.sandbox, gateway.code.case_time_s, num_solutions)
    return told


def check_named(recipe: Recipe) -> None:
    """Of ``check_recipe`` the data, the workflow with its settings, and the starting checkpoints' functions: what `millrace run`
    would else find out when processes run, minutes later."""
    _refuse(recipe, _named_problems(recipe, [], {}))


def _refuse(recipe: Recipe, problems: Sequence[str]) -> None:
    if problems:
        lines = [line for problem in problems for line in problem.splitlines()]
        raise ConfigError(f"{recipe.name} cannot run:\n" + "\n".join(f"  {line.strip()}" for line in lines))


def _named_problems(recipe: Recipe, left_out: list[str], sources: dict[str, TaskSource]) -> list[str]:
    """The problems; what is left out of datasets is added to ``left_out``, and those that are here to ``sources``."""
    problems = []
    checks: list[Callable[[], object]] = [
        *(partial(_check_data, recipe, where, left_out, sources) for where in recipe.data.sections()),
        lambda: _check_workflow(recipe),
        lambda: _check_warm_start(recipe),
        lambda: _check_losses(recipe),
    ]
    for check in checks:
        try:
            check()
        except MillraceError as error:
            problems.append(error.message)
    return problems


def describe(recipe: Recipe, left_out: Sequence[str] = ()) -> RenderableType:
    """What would be started, and on what; ``left_out``: what ``check_recipe`` found."""
    processes = Table(box=None, header_style="dim")
    for column in ("process", "node", "address", "GPUs", "command"):
        processes.add_column(column, overflow="fold", no_wrap=column != "command")
    dialled = orchestrator_address(recipe)
    known = f"{dialled.removesuffix(':0')}:PORT" if dialled.endswith(":0") else dialled
    for node in recipe.nodes():
        for spec in plan(recipe, Path(recipe.run.dir) / (recipe.run.id or "RUN"), node):
            address = spec.address if not spec.address.endswith(":0") else "a free port"
            gpus = spec.env.get("CUDA_VISIBLE_DEVICES", "")
            processes.add_row(
                spec.name, str(node), address, gpus, " ".join(["python", *spec.argv[1:]]).replace(dialled, known)
            )
    policies = Table(box=None, header_style="dim")
    for column in ("policy", "model", "loss", "batch", "staleness (late)", "ranks"):
        policies.add_column(column, overflow="fold")
    for name, policy in recipe.policies.items():
        policies.add_row(
            name,
            policy.model.path or "made by the warm start",
            *(
                (
                    policy.algorithm.name,
                    f"{policy.batch.size} sequences in {policy.batch.minibatches}",
                    f"{policy.batch.max_staleness} ({policy.batch.late})",
                    str(policy.trainer.num_ranks),
                )
                if policy.trained
                else ("not trained", "", "", "")
            ),
        )
    lacking = launch_problems(recipe)
    steps = f"{recipe.run.steps} training steps"
    verdict = f"is valid ({steps}), and cannot be run here yet:" if lacking else f"is ready to run: {steps}"
    return Group(
        Text(f"{recipe.name} {verdict}", style="bold green"),
        *(Text(f"  {problem}", style="yellow") for problem in (*lacking, *left_out)),
        policies,
        *_memory(recipe),
        processes,
    )


def _memory(recipe: Recipe) -> list[RenderableType]:
    """Estimated GiB on each GPU: a line for each part, a column for each process."""
    found = list(estimates(recipe))
    if not found:
        return []
    names = list(dict.fromkeys(name for estimate in found for name in estimate.parts))
    table = Table(box=None, header_style="dim")
    table.add_column("GiB on each GPU, estimated", style="dim", min_width=len("activations"), max_width=16)
    for estimate in found:
        place = f"node {estimate.node}, GPU {','.join(map(str, estimate.gpus))}"
        table.add_column(f"{estimate.process.replace(': ', ' ')} {place}", justify="right", max_width=18)
    for name in names:
        table.add_row(
            name, *(f"{estimate.parts[name] / GIB:.1f}" if name in estimate.parts else "" for estimate in found)
        )
    of = f"{recipe.launch.gpu_memory_gib:g}"
    table.add_row("in all", *(f"{estimate.total / GIB:.1f} of {of}" for estimate in found), style="bold")
    return [table]


def _check_data(recipe: Recipe, where: str, left_out: list[str], sources: dict[str, TaskSource]) -> None:
    config = recipe.data.sections()[where]
    if config.generator is None and config.path is not None and not Path(config.path).exists():
        if Path(config.path).suffix in (".jsonl", ".json", ".ndjson", ".parquet") or config.path.startswith(("/", ".")):
            raise ConfigError(
                f"{where}.path: {config.path} does not exist; write an existing jsonl or parquet file, or a dataset name"
            )
        return  # a hub name: fetched on first use
    from services.orchestrator.catalogue import is_fetched, must_be_fetched_by_hand
    from services.orchestrator.datasets import open_source
    from services.orchestrator.requirements import requirement

    try:
        if config.name is not None:
            if must_be_fetched_by_hand(config.name, f"{where}.name"):
                return  # what a machine lacks is no fault of the recipe: told by `describe`, refused by `run`
            if is_fetched(config.name):
                return  # on first use
        tasks = open_source(config, recipe.data.seed_of(where, recipe.run.seed), requirement(recipe, where))
    except MillraceError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    sources[where] = tasks
    if tasks.left_out.count:
        left_out.append(
            f"{where}: {tasks.left_out.count} of {len(tasks) + tasks.left_out.count} rows cannot be used and are left out: "
            f"{tasks.left_out}"
        )


def _check_workflow(recipe: Recipe) -> None:
    from services.inference.scripts.registry import load_scripts
    from services.inference.workflows.registry import build_workflows

    build_workflows(recipe)
    for service in recipe.inference.values():
        if service.engine == "forced":
            load_scripts(service.forced, recipe)


def _check_warm_start(recipe: Recipe) -> None:
    for policy, section in recipe.warm_start.items():
        for key in ("builder", "dialogues"):
            value: str | None = getattr(section, key)
            if value is None or (key == "dialogues" and Path(value).is_file()):
                continue
            try:
                found = load_object(value)
            except MillraceError as error:
                raise ConfigError(f"warm_start.{policy}.{key}: {error.message}") from None
            if not callable(found):
                raise ConfigError(f"warm_start.{policy}.{key}: {value} is no function")


def _check_losses(recipe: Recipe) -> None:
    """A loss that is named by import path is only looked for: its module imports torch, which this process does not."""
    for policy, section in recipe.trained_policies.items():
        if isinstance(section.algorithm, LossByPath):
            try:
                check_can_be_loaded(section.algorithm.name)
            except ConfigError as error:
                raise ConfigError(f"policies.{policy}.algorithm.name: {error.message}") from None
