"""``rollmill check``: finds the errors of a recipe that can be known before a process starts.

Loading checks the schema; this module checks the things that the recipe names: data, workflow, rewards, models, ports,
GPU memory. ``check.launch`` checks this machine: `rollmill check` shows its problems, `rollmill run` refuses to start
with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.check.launch import launch_problems, problems_anywhere, refuse
from services.cli.check.memory import GIB, estimates, host_lines
from services.cli.check.model_trials import model_trials
from services.cli.check.one_row import FIRST_ROW, Tried, try_rows
from services.cli.check.sizes import size_notes, size_problems
from services.cli.plan.specs import orchestrator_address, plan, ports_in_use
from services.common.config.data import is_training
from services.common.config.processes.envgateway import EnvGatewayConfig
from services.common.config.processes.services import ENGINES
from services.common.config.recipe import Recipe
from services.common.config.training.losses import LOSS, LossByPath
from services.common.errors import ConfigError, RollmillError
from services.common.importing import check_can_be_loaded, definition_of, load_object
from services.common.user_code import check_call

if TYPE_CHECKING:
    from services.orchestrator.tasks.datasets import TaskSource


def check_recipe(recipe: Recipe, num_solutions: int = 0) -> list[str]:
    """Check a recipe and describe its data, one line per dataset: rows that are left out, evaluation tasks that occur
    in the training data, and the results of ``num_solutions`` reference solutions.

    Raises:
        ConfigError: one line per problem: the place, the fault and the correction.
    """
    left_out: list[str] = []
    sources: dict[str, TaskSource] = {}
    named = _named_problems(recipe, left_out, sources)
    found = [*ports_in_use(recipe), *problems_anywhere(recipe)]
    tried = try_rows(recipe, sources) if not [*found, *named] else Tried([], [])  # broken parts are not tried
    refuse(recipe, [*found, *named, *tried.problems])
    refused, untried = model_trials(recipe)
    refuse(recipe, refused)
    from services.cli.check.overlap import overlap_lines

    told = [*left_out, *untried, *size_notes(recipe), *tried.told, *overlap_lines(recipe, sources)]
    if num_solutions:
        from services.cli.check.solutions import solution_lines

        gateway = recipe.envgateway or EnvGatewayConfig()
        told += solution_lines(sources, gateway.sandbox, gateway.code.case_time_s, num_solutions)
    return told


def check_named(recipe: Recipe) -> None:
    """Check the data, the workflow with its settings, and the functions of starting checkpoints: errors that `rollmill
    run` would otherwise find minutes later, when processes run."""
    refuse(recipe, _named_problems(recipe, [], {}))


def _named_problems(recipe: Recipe, left_out: list[str], sources: dict[str, TaskSource]) -> list[str]:
    """The problems. Adds the rows that are left out to ``left_out``, and the datasets on this machine to ``sources``."""
    problems = size_problems(recipe)
    for where, check in _checks(recipe, left_out, sources):
        try:
            check()
        except RollmillError as error:
            problems.append(f"{where}: {error.message}" if where else error.message)
    return problems


def _checks(
    recipe: Recipe, left_out: list[str], sources: dict[str, TaskSource]
) -> Iterator[tuple[str, Callable[[], object]]]:
    """(key in the recipe, check) of every part that the recipe names; the key is empty if the message of the check has the key.

    Engines, losses and import paths of the gateway are searched and not imported: their modules may import torch, or
    packages that are not here.
    """
    for where in recipe.data.sections():
        yield "", partial(_check_data, recipe, where, left_out, sources)
    yield "", partial(_check_workflow, recipe)
    for policy, section in recipe.warm_start.items():
        given = {"directory": Path(), "seed": 0, **section.builder_settings}
        yield "", partial(_check_warm_start, f"warm_start.{policy}.builder", section.builder, "builder", given)
        if section.dialogues is not None and not Path(section.dialogues).is_file():
            given = {"seed": 0, **section.dialogue_settings}
            yield (
                "",
                partial(_check_warm_start, f"warm_start.{policy}.dialogues", section.dialogues, "dialogues", given),
            )
    for name, policy_section in recipe.trained_policies.items():
        if isinstance(policy_section.algorithm, LossByPath):
            yield f"policies.{name}.algorithm.name", partial(_check_loss, policy_section.algorithm.name)
    for name, service in recipe.inference.items():
        if service.engine not in ENGINES:
            yield f"inference.{name}.engine", partial(_check_engine, service.engine)
    if (gateway := recipe.envgateway) is not None:
        for name, path in gateway.environments.items():
            yield f"envgateway.environments.{name}", partial(_check_environment, path)
        paths = {f"tools.paths[{number}]": path for number, path in enumerate(gateway.tools.paths)}
        paths |= {f"rewards[{number}]": path for number, path in enumerate(gateway.rewards)}
        for where, path in paths.items():
            yield f"envgateway.{where}", partial(check_can_be_loaded, path)


def describe(recipe: Recipe, left_out: Sequence[str] = ()) -> RenderableType:
    """Describe the processes and devices of a recipe; ``left_out`` is the result of ``check_recipe``."""
    processes = Table(box=None, header_style="dim")
    for column in ("process", "node", "address", "GPUs", "command"):
        processes.add_column(column, overflow="fold", no_wrap=column != "command")
    dialled = orchestrator_address(recipe)
    known = f"{dialled.removesuffix(':0')}:PORT" if dialled.endswith(":0") else dialled
    for node in recipe.nodes():
        for spec in plan(recipe, Path(recipe.run.dir) / (recipe.run.id or "RUN"), node):
            address = spec.address if not spec.address.endswith(":0") else "a free port"
            gpus = spec.env.get("CUDA_VISIBLE_DEVICES", "")
            processes.add_row(spec.name, str(node), address, gpus, spec.shown.replace(dialled, known))
    policies = Table(box=None, header_style="dim")
    for column in ("policy", "model", "loss", "batch", "ranks"):
        policies.add_column(column, overflow="fold")
    for name, policy in recipe.policies.items():
        policies.add_row(
            name,
            policy.model.path or "made by the warm start",
            *(
                (
                    policy.algorithm.name,
                    f"{policy.batch.size} sequences in {policy.batch.minibatches}",
                    str(policy.trainer.num_ranks),
                )
                if policy.trained
                else ("not trained", "", "")
            ),
        )
    lacking = launch_problems(recipe)
    steps = f"{recipe.run.steps} training steps{'' if recipe.run.until is None else ' at most (run.until)'}"
    verdict = f"is valid ({steps}), and cannot be run here yet:" if lacking else f"is ready to run: {steps}"
    allowed = [f"{name}: {policy.batch.lateness}" for name, policy in recipe.trained_policies.items()]
    return Group(
        Text(f"{recipe.name} {verdict}", style="bold green"),
        *(Text(f"  {line}", style="" if line.startswith(FIRST_ROW) else "yellow") for line in (*lacking, *left_out)),
        policies,
        *(Text(f"  {line}") for line in allowed),
        *_memory(recipe),
        *(Text(line, style="dim") for line in host_lines(recipe)),
        processes,
    )


def _memory(recipe: Recipe) -> list[RenderableType]:
    """Estimated GiB on each GPU: a line for each part, a column for each process."""
    found = estimates(recipe)
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
    from services.orchestrator.tasks.catalogue import is_fetched, must_be_fetched_by_hand
    from services.orchestrator.tasks.datasets import open_source
    from services.orchestrator.tasks.requirements import requirement
    from services.orchestrator.tasks.row_files import KINDS, is_file_of_rows

    config = recipe.data.sections()[where]
    if config.path is not None and not Path(config.path).exists():
        if is_file_of_rows(config.path):
            raise ConfigError(
                f"{where}.path: {Path(config.path).absolute()} does not exist; write an existing file ({', '.join(KINDS)}), or a dataset name"
            )
        return  # a hub name: fetched on first use
    try:
        if config.name is not None:
            if must_be_fetched_by_hand(config.name, f"{where}.name"):
                return  # problems of the machine are no error of the recipe: `describe` shows them, `run` refuses
            if is_fetched(config.name):
                return  # on first use
        seed, evaluates = recipe.data.seed_of(where, recipe.run.seed), not is_training(where)
        tasks = open_source(config, seed, requirement(recipe, where), evaluates=evaluates)
    except RollmillError as error:
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


def _check_warm_start(where: str, path: str, function: str, given: dict[str, object]) -> None:
    if ":" not in path:
        raise ConfigError(f"{where}: {path} is neither an existing file nor an import path (package.module:function)")
    try:
        found = load_object(path)
    except RollmillError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    check_call(found, f"{where}: {path}", f"def {function}({', '.join(given)})", keywords=given)


def _check_loss(path: str) -> None:
    definition = definition_of(path)
    if definition is not None:
        definition.check_function(path, 2, LOSS)


def _check_engine(path: str) -> None:
    from services.inference.engine.streaming import TOKENS

    definition = definition_of(path)
    if definition is not None:
        definition.check_class(path, ("rollmill.Engine", "Engine"), TOKENS)


def _check_environment(path: str) -> None:
    from services.envgateway.envs.registry import ENVIRONMENT_METHODS

    definition = definition_of(path)
    if definition is not None:
        wanted = {name: ENVIRONMENT_METHODS[name] for name in ("reset", "step")}  # ``rollmill.Environment`` has a close
        definition.check_class(path, ("rollmill.Environment", "Environment"), wanted)
