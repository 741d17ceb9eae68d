"""``rollmill check``: finds the errors of a recipe that can be known before a process starts.

Loading checks the schema; this module checks the things that the recipe names (data, workflow, rewards, models, ports, GPU
memory), compares its numbers with each other, with the model and with the disk, and looks whether this machine can start it
(data, GPUs, packages, memory, worlds). `rollmill check` shows the problems of this machine, and `rollmill run` refuses to
start with them, instead of failing hours later.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from services.cli.check.memory import GIB, estimates, host_lines, host_problems, misfits, small_caches
from services.cli.check.models import (
    hub_problems,
    lacks_chat_template,
    model_problems,
    model_trials,
    other_architecture,
    positions,
)
from services.cli.check.worlds import index_problems, mcp_problems, sandbox_problems, world_problems
from services.cli.plan import orchestrator_address, plan, ports_in_use
from services.common.config.algorithm import LossByPath
from services.common.config.data import WorkflowConfig, is_training
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.processes import (
    ENGINES,
    InferenceConfig,
    Placement,
    check_placement,
    gpu_claims,
    missing_packages,
)
from services.common.config.recipe import ONE_SEQUENCE, Recipe
from services.common.config.training import PolicyConfig, TrainerConfig
from services.common.dataset_rows import BuiltInReward, BuiltInWorkflow
from services.common.errors import ConfigError, RollmillError
from services.common.extras import provided
from services.common.importing import check_call, check_can_be_loaded, load_object
from services.common.installing import install, make_server_environment, missing
from services.common.system.devices import has_gpu_driver, visible_gpus
from services.envgateway.envs.episodes import ENVIRONMENTS
from services.inference.workflows.registry import load_workflow, workflow_settings

if TYPE_CHECKING:
    from services.orchestrator.tasks.rows import UsableRows


def check_recipe(recipe: Recipe, num_solutions: int = 0) -> list[str]:
    """Check a recipe and describe its data, one line per dataset: rows that are left out, evaluation tasks that occur
    in the training data, and the results of ``num_solutions`` reference solutions.

    Raises:
        ConfigError: one line per problem: the place, the fault and the correction.
    """
    # tokenizers, rewards, the judge: not for a launch
    from services.cli.check.data import Tried, overlap_lines, solution_lines, try_rows

    left_out: list[str] = []
    sources: dict[str, UsableRows] = {}
    named = _named_problems(recipe, left_out, sources)
    found = [*ports_in_use(recipe), *problems_anywhere(recipe)]
    tried = try_rows(recipe, sources) if not [*found, *named] else Tried([], [])  # broken parts are not tried
    refuse(recipe, [*found, *named, *tried.problems])
    refused, untried = model_trials(recipe)
    refuse(recipe, refused)
    told = [*left_out, *untried, *size_notes(recipe), *tried.told, *overlap_lines(recipe, sources)]
    if num_solutions:
        gateway = recipe.envgateway or EnvGatewayConfig()
        told += solution_lines(sources, gateway.sandbox, gateway.code.case_time_s, num_solutions)
    return told


def check_named(recipe: Recipe) -> None:
    """Check the data, the workflow with its settings, and the functions of starting checkpoints: errors that `rollmill
    run` would otherwise find minutes later, when processes run."""
    refuse(recipe, _named_problems(recipe, [], {}))


def _named_problems(recipe: Recipe, left_out: list[str], sources: dict[str, UsableRows]) -> list[str]:
    """The problems. Adds the rows that are left out to ``left_out``, and the datasets on this machine to ``sources``.

    Engines, losses and import paths of the gateway are searched and not imported: their modules may import torch, or
    packages that are not here.
    """
    from services.inference.workflows.registry import build_workflows
    from services.inference.workflows.scripts import load_scripts

    problems = size_problems(recipe)

    @contextlib.contextmanager
    def part(where: str = "") -> Iterator[None]:
        """A part that the recipe names at a key; no key where the message of the check has it."""
        try:
            yield
        except RollmillError as error:
            problems.append(f"{where}: {error.message}" if where else error.message)

    for where in recipe.data.sections():
        with part():
            _check_data(recipe, where, left_out, sources)
    with part():
        build_workflows(recipe)
        for service in recipe.inference.values():
            if service.engine == "forced":
                load_scripts(service.forced, recipe)
    for policy, section in recipe.warm_start.items():
        given = {"directory": Path(), "seed": 0, **section.builder_settings}
        with part():
            _check_warm_start(f"warm_start.{policy}.builder", section.builder, "builder", given)
        if section.dialogues is not None and not Path(section.dialogues).is_file():
            given = {"seed": 0, **section.dialogue_settings}
            with part():
                _check_warm_start(f"warm_start.{policy}.dialogues", section.dialogues, "dialogues", given)
    # The processes that import these check their signatures as they start; here no dependency of theirs, such as torch, is.
    paths = {
        f"policies.{name}.algorithm.name": policy.algorithm.name
        for name, policy in recipe.trained_policies.items()
        if isinstance(policy.algorithm, LossByPath)
    }
    paths |= {
        f"inference.{name}.engine": service.engine
        for name, service in recipe.inference.items()
        if service.engine not in ENGINES
    }
    if (gateway := recipe.envgateway) is not None:
        paths |= {f"envgateway.environments.{name}": path for name, path in gateway.environments.items()}
        paths |= {f"envgateway.tools.paths[{number}]": path for number, path in enumerate(gateway.tools.paths)}
        paths |= {f"envgateway.rewards[{number}]": path for number, path in enumerate(gateway.rewards)}
    for where, path in paths.items():
        with part(where):
            check_can_be_loaded(path)
    return problems


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
    from services.cli.check.data import FIRST_ROW

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


def _check_data(recipe: Recipe, where: str, left_out: list[str], sources: dict[str, UsableRows]) -> None:
    from services.orchestrator.tasks.datasets import KINDS, is_file_of_rows, open_source, requirement
    from services.orchestrator.tasks.rows import is_fetched, must_be_fetched_by_hand

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


def _check_warm_start(where: str, path: str, function: str, given: dict[str, object]) -> None:
    if ":" not in path:
        raise ConfigError(f"{where}: {path} is neither an existing file nor an import path (package.module:function)")
    try:
        found = load_object(path)
    except RollmillError as error:
        raise ConfigError(f"{where}: {error.message}") from None
    check_call(found, f"{where}: {path}", f"def {function}({', '.join(given)})", keywords=given)


HIGHEST_LR = 0.1


def size_problems(recipe: Recipe) -> list[str]:
    """A line for each contradiction."""
    found = [
        *_model_problems(recipe),
        *_gateway_problems(recipe),
        *_directory_problems(recipe),
        *_plan_problems(recipe),
    ]
    for name, policy in recipe.trained_policies.items():
        if recipe.run.steps:
            found += _batch_problems(name, policy, recipe)
        if policy.optimizer.lr > HIGHEST_LR:
            found.append(
                f"policies.{name}.optimizer.lr is {policy.optimizer.lr:g}: AdamW moves every weight by about that much in each "
                f"update. Write at most {HIGHEST_LR:g}; pretrained models take 1e-7 to 1e-5, tiny ones 1e-3"
            )
    return found


def size_notes(recipe: Recipe) -> list[str]:
    """A line for each setting that may be meant, as in a short trial of a long run, and is a mistake otherwise."""
    notes = []
    for name in recipe.trained_policies if recipe.run.steps else ():
        optimizer = recipe.optimizer(name)
        if optimizer.total_updates is not None and optimizer.warmup_updates >= optimizer.total_updates:
            notes.append(
                f"policies.{name}.optimizer.warmup_updates is {optimizer.warmup_updates}, and the run has {optimizer.total_updates} "
                "updates (run.steps times batch.minibatches): lr is never reached"
            )
    return notes


def _model_problems(recipe: Recipe) -> Iterator[str]:
    for name, policy in recipe.policies.items():
        path, length = policy.model.path, policy.model.context_length
        if path is None:
            continue
        longest = positions(path)
        if longest is not None and length > longest:
            yield (
                f"policies.{name}.model.context_length is {length}, and {path} has {longest} positions "
                f"(max_position_embeddings of its config.json): write at most {longest}"
            )
        if name in recipe.playing_policies and lacks_chat_template(path):
            yield (
                f"policies.{name}.model.path: the tokenizer of {path} has no chat template, so no prompt can be written: take an "
                "instruction-tuned model, or put a chat_template.jinja into the directory"
            )
        if (other := other_architecture(path)) is not None:
            yield f"policies.{name}.model.path: {path} is a {other}, and no causal language model: take a model that generates"


def _batch_problems(name: str, policy: PolicyConfig, recipe: Recipe) -> Iterator[str]:
    batch, group = policy.batch, recipe.rollout.group_size
    played = {recipe.workflow_of(where).name for where in recipe.data.training}
    if not played <= set(ONE_SEQUENCE) or batch.replay.ratio > 0:
        return
    kept, key = (group, "rollout.group_size")
    if batch.resample is not None:
        kept, key = (batch.resample.keep, f"policies.{name}.batch.resample.keep")
    where = f"policies.{name}.batch"
    if batch.size % kept:
        fitting = [size for size in (batch.size // kept * kept, -(-batch.size // kept) * kept) if size]
        yield (
            f"{where}.size is {batch.size}, and a batch takes whole groups of {kept} ({key}): write "
            f"{' or '.join(map(str, fitting))}, or another {key}"
        )
    elif batch.size % batch.minibatches:
        fitting = [number for number in range(1, batch.size + 1) if batch.size % number == 0]
        nearest = sorted(sorted(fitting, key=lambda number: abs(number - batch.minibatches))[:2])
        yield (
            f"{where}.minibatches is {batch.minibatches}, and {where}.size {batch.size} cannot be cut into as many equal parts: "
            f"write {' or '.join(map(str, nearest))}"
        )


def _plan_problems(recipe: Recipe) -> Iterator[str]:
    """Runs that would wait for ever, or do nothing."""
    slots = max(service.num_slots for service in recipe.inference.values()) if recipe.inference else None
    group = recipe.rollout.group_size
    if recipe.run.steps and slots is not None and group > slots:
        yield (
            f"rollout.group_size is {group}, and the largest inference service has {slots} slots (inference.<name>.num_slots): "
            "one replica plays a whole group, so write a smaller group or more slots"
        )
    evaluation = recipe.evaluation
    plays = recipe.data.evaluation and (evaluation.at_start or evaluation.at_end)
    if not recipe.run.steps and not plays:
        yield "run.steps is 0 and no evaluation is played, so the run has nothing to do: write steps, or data.evaluation"
    for place in recipe.modules:
        if not Path(place).is_dir():
            yield f"modules names {place}, which is no directory: correct it, or leave it out"
    smallest = min(policy.model.context_length for policy in recipe.policies.values())
    for name, sampling in evaluation.samplings.items():
        if plays and sampling.max_new_tokens >= smallest:
            yield (
                f"evaluation.samplings.{name}.max_new_tokens ({sampling.max_new_tokens}) leaves no room for a prompt in "
                f"model.context_length ({smallest})"
            )


def _gateway_problems(recipe: Recipe) -> Iterator[str]:
    yield from _unscored_problems(recipe)
    for where, workflow in recipe.workflows().items():
        if workflow.name == BuiltInWorkflow.AGENT_ENV:
            yield from _environment_problems(recipe, where, workflow)
            continue
        runs, reward = workflow.runs_programs(), _reward_of(where, workflow)
        if recipe.envgateway is None and (runs or reward in tuple(BuiltInReward)):
            default = "" if "reward" in workflow.settings else ", its default"
            asks = runs or f"settings.reward is {reward!r}{default}"
            yield (
                f"{where}.{asks}, which the environment gateway computes, and envgateway is null: leave envgateway out, or name a "
                "function of yours (package.module:function)"
            )


def _reward_of(where: str, workflow: WorkflowConfig) -> str | None:
    """The reward that a workflow names. The default of a user's workflow counts where its module calls ``grade``."""
    with contextlib.suppress(ConfigError, OSError):  # told by the check of the workflow; a module without source
        reward: str | None = getattr(workflow_settings(workflow, where), "reward", None)
        asks = "reward" in workflow.settings or workflow.name in tuple(BuiltInWorkflow)
        if asks or ".grade(" in inspect.getsource(sys.modules[load_workflow(workflow.name).__module__]):
            return reward
    return None


def _unscored_problems(recipe: Recipe) -> Iterator[str]:
    """Tasks of reasoning-gym that would be graded as math, the default."""
    for section, config in recipe.data.sections().items():
        workflow = recipe.workflow_of(section)
        graded = "reward" in workflow.settings or _reward_of(section, workflow) != BuiltInReward.MATH
        if config.reasoning_gym is not None and not graded:
            yield (
                f"{section}.reasoning_gym is {config.reasoning_gym}, and its workflow has no settings.reward, which is math then: "
                "write workflow.settings.reward: reasoning_gym for the task's own score"
            )


def _environment_problems(recipe: Recipe, where: str, workflow: WorkflowConfig) -> Iterator[str]:
    gateway, name = recipe.envgateway, workflow.settings.get("environment", "textworld")
    if gateway is None:
        yield f"{where}.name is {workflow.name}, and envgateway, which holds its environment, is null: leave envgateway out"
    elif name not in (
        known := sorted(
            {
                *ENVIRONMENTS,
                *provided("environments"),
                *gateway.environments,
                *(name for section in provided("servers") for name in gateway.extra(section)),
            }
        )
    ):
        yield (
            f"{where}.settings.environment is {name!r}, which the gateway does not have: write one of {', '.join(known)}, or name "
            "its class under envgateway.environments"
        )


def _directory_problems(recipe: Recipe) -> Iterator[str]:
    place = Path(recipe.run.dir).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    if not place.is_dir():
        yield f"run.dir is {recipe.run.dir}, and {place} is a file: name another directory"
        return
    try:
        tempfile.TemporaryDirectory(prefix=".rollmill-check-", dir=place).cleanup()
    except OSError as error:
        yield f"run.dir is {recipe.run.dir}, and {place} cannot be written ({error.strerror}): name another directory"


_ASK_TIMEOUT_S = 120.0  # for another interpreter, to import torch and initialise a GPU
_OTHER_FILES = 512  # open files of a replica beside one connection for each slot


def on_this_machine(recipe: Recipe) -> Recipe:
    """The recipe as node 0 runs it here: devices, types and placement that are `auto`, and the memory of the GPU that sections
    take which name none."""
    gpus = gpus_here()
    # Else each process looks for itself.
    if _may_have_others(gpus):
        return recipe
    found = recipe.with_devices(has_gpu=bool(gpus), node=0)
    sections = _computing(found).values()
    unnamed = [section for section in sections if section.device == "cuda" and not section.gpus]
    placement, launch = found.placement, found.launch
    if placement is Placement.AUTO:
        placement = Placement.APART
        if len(gpus) == 1 and len(unnamed) == len(sections) and len({type(section) for section in unnamed}) == 2:
            with contextlib.suppress(ValueError):  # engines that do not free their memory, processes of other nodes
                check_placement(found.inference, found.policies, Placement.SHARED)
                placement = Placement.SHARED
    if gpus and unnamed:
        written = [launch.gpu_memory_gib] if "gpu_memory_gib" in recipe.launch.model_fields_set else []
        taken = gpus[: max(section.num_ranks if isinstance(section, TrainerConfig) else 1 for section in unnamed)]
        launch = launch.model_copy(update={"gpu_memory_gib": min([float(int(min(taken))), *written])})
    return found.model_copy(update={"placement": placement, "launch": launch})


def _may_have_others(gpus: Sequence[float]) -> bool:
    """Whether there may be GPUs that `nvidia-smi` does not tell: a part of one, or no such program."""
    return not gpus and has_gpu_driver() and visible_gpus(os.environ) != []


def _computing(recipe: Recipe) -> dict[str, InferenceConfig | TrainerConfig]:
    """The sections of node 0 that compute with a model, by their keys."""
    found: dict[str, InferenceConfig | TrainerConfig] = {}
    for name, service in recipe.inference.items():
        if service.node == 0 and service.engine != "scripted":
            found[f"inference.{name}"] = service
    for name, policy in recipe.trained_policies.items() if recipe.run.steps else ():
        found[f"policies.{name}.trainer"] = policy.trainer
    return found


def check_launch(recipe: Recipe) -> None:
    """Raise ``ConfigError`` with one line per problem: the missing part and the remedy."""
    refuse(recipe, [*problems_anywhere(recipe), *launch_problems(recipe)])


def refuse(recipe: Recipe, problems: Sequence[str]) -> None:
    """Raise ``ConfigError`` with the problems, if there are any."""
    if problems:
        lines = [line for problem in problems for line in problem.splitlines()]
        raise ConfigError(f"{recipe.name} cannot run:\n" + "\n".join(f"  {line.strip()}" for line in lines))


def problems_anywhere(recipe: Recipe) -> list[str]:
    """Problems that do not depend on what this machine has: memory, models, worlds, the hub's answers."""
    return [
        *misfits(recipe),
        *small_caches(recipe),
        *model_problems(recipe),
        *index_problems(recipe),
        *(problem.text for problem in hub_problems(recipe) if not problem.of_machine),
    ]


def launch_problems(recipe: Recipe) -> list[str]:
    """Problems of this machine with a valid recipe, one line each."""
    gpus = gpus_here()
    return [
        *missing_data(recipe),
        *gpu_problems(recipe, gpus),
        *(misfits(smaller) if (smaller := smaller_cards(recipe, gpus)) else ()),
        *host_problems(recipe, has_gpus=bool(gpus) or _may_have_others(gpus)),
        *_file_problems(recipe),
        *_disk_problems(recipe),
        *_interpreter_problems(recipe, has_gpus=bool(gpus)),
        *(problem.text for problem in hub_problems(recipe) if problem.of_machine),
        *missing_packages(recipe.run.trackers),
        *(
            [*world_problems(recipe), *sandbox_problems(recipe), *mcp_problems(recipe)]
            if recipe.envgateway and recipe.envgateway.node == 0
            else ()
        ),
    ]


def check_worlds(recipe: Recipe) -> None:
    """Raises ``ConfigError`` for a world that the gateway, which is about to start here, would miss at the first episode."""
    if problems := [*index_problems(recipe), *world_problems(recipe)]:
        raise ConfigError(f"the environment gateway of {recipe.name} cannot start:\n" + "\n".join(problems))


def missing_data(recipe: Recipe) -> list[str]:
    """Datasets known by name that are neither on this disk nor fetched by themselves."""
    from services.orchestrator.tasks.rows import must_be_fetched_by_hand

    named = {where: config.name for where, config in recipe.data.sections().items() if config.name is not None}
    found = (must_be_fetched_by_hand(name, f"{where}.name") for where, name in named.items())
    return [problem for problem in found if problem]


def _interpreter_problems(recipe: Recipe, *, has_gpus: bool) -> list[str]:
    """Services of this node without their packages, and sections whose interpreter lacks the engine's package or has a PyTorch
    that cannot use the GPU there is."""
    from services.inference.engine.served.process import interpreter, python_variable, runs_on_cpu

    extras = {process.name.partition("-")[0] for process in plan(recipe, Path(), 0)}
    lacking = sorted({package for extra in extras for package in missing(extra)})
    problems = [f"its services need {', '.join(lacking)}, not installed here: {install('all')}"] if lacking else []
    for where, section in _computing(recipe).items():
        python, engine = sys.executable, section.engine if isinstance(section, InferenceConfig) else "torch"
        if isinstance(section, InferenceConfig) and section.servers is not None:
            on_cpu = runs_on_cpu(section)
            try:
                python = interpreter(engine, section.servers.python, on_cpu=on_cpu)
            except ConfigError as error:
                problems.append(f"{where}: {error.message}")
                continue
            if why := _error_of(python, _IMPORT.format(engine=engine, on_cpu=on_cpu)):
                problems.append(
                    f"{where}.engine is {engine}, but {why}: run `{make_server_environment(engine, on_cpu=on_cpu)}`, name the "
                    f"interpreter that has it with {where}.{engine}.python or {python_variable(engine)}, or try the recipe with "
                    "--profile tiny"
                )
                continue
        asks_torch = has_gpus and section.device == "cuda" and engine in ENGINES
        if asks_torch and (why := _error_of(python, "import torch; torch.cuda.init()")):
            problems.append(
                f"{where}.device is cuda, but the PyTorch of {python} cannot use the GPU ({why}): install a CUDA build that the "
                "driver supports (`nvidia-smi` shows its CUDA version), or leave gpus out and write device: cpu"
            )
    return problems


# An engine's own import takes many seconds; an install that did not end shows in the import of torch.
_IMPORT = """
import importlib.util, sys
importlib.util.find_spec("{engine}") or sys.exit(f"the package {engine} is not installed for {{sys.executable}}")
import torch
{on_cpu} or torch.version.cuda or sys.exit(f"torch {{torch.__version__}} of {{sys.executable}} is built for CPUs")
"""


@functools.cache
def _error_of(python: str, code: str) -> str:
    """The last line of the error with which code of another interpreter ends; empty when it ends well."""
    asked = [python, "-c", code]
    try:
        answer = subprocess.run(asked, check=False, capture_output=True, text=True, timeout=_ASK_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return (answer.stderr.strip() or f"exit code {answer.returncode}").splitlines()[-1] if answer.returncode else ""


def _file_problems(recipe: Recipe) -> list[str]:
    """One line for each service of node 0 with more connections than its process may open files."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return [
        f"inference.{name}.num_slots is {service.num_slots}, each of which has a connection, and a process may open {most} files "
        f"here (`ulimit -Hn`): raise the hard limit to {2 * service.num_slots + _OTHER_FILES} (limits.conf, LimitNOFILE, --ulimit "
        f"nofile), or write at most {max(1, most - _OTHER_FILES)} slots"
        for name, service in recipe.inference.items()
        if service.node == 0 and service.servers and 0 <= most < service.num_slots + _OTHER_FILES  # -1: no limit
    ]


def _disk_problems(recipe: Recipe) -> list[str]:
    """A line where the disk of the runs has less free than a run needs to issue tasks."""
    place, least = Path(recipe.run.dir).absolute(), recipe.orchestrator.min_free_bytes
    free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
    told = f"run.dir {recipe.run.dir}: its disk has {free} bytes free, and below orchestrator.min_free_bytes ({least}) no task is issued"
    return [f"{told}: free some, name another disk, or lower it"] if free < least else []


_ASK = ("nvidia-smi", "--query-gpu=memory.total,uuid", "--format=csv,noheader,nounits")  # a line for each, in MiB
_TIMEOUT_S = 20.0
_TOLD_SHARE = 0.9  # of the memory in the recipe: drivers reserve some, and recipes say 80, not 79.6


def gpus_here() -> list[float]:
    """GiB of each GPU that CUDA_VISIBLE_DEVICES shows, in its order; empty where no NVIDIA driver answers."""
    try:
        answer = subprocess.run(_ASK, check=True, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [[part.strip() for part in line.split(",")] for line in answer.stdout.split("\n")]
    found = [(float(line[0]) / 1024, line[-1]) for line in lines if line[0].isdecimal()]
    shown = visible_gpus(os.environ)
    if shown is None:
        return [memory for memory, _ in found]
    memories = []
    for name in shown:
        matching = [memory for place, (memory, uuid) in enumerate(found) if str(place) == name or uuid.startswith(name)]
        if not matching:  # a part of a GPU (MIG), whose memory this does not tell, or a name that is none
            break
        memories.append(matching[0])
    return memories


def gpu_problems(recipe: Recipe, memory_gib: Sequence[float]) -> list[str]:
    """One line for each section of node 0 whose GPUs are missing on this machine."""
    if _may_have_others(memory_gib):
        return []
    if not memory_gib:
        lacking = {where: section for where, section in _computing(recipe).items() if section.device == "cuda"}
        return [
            f"{where}.{f'gpus is {section.gpus}' if section.gpus else 'device is cuda'}, but this machine has no NVIDIA GPU "
            "(`nvidia-smi -L` finds none): run this on a GPU machine, "
            f"{'or try the recipe with --profile tiny' if section.gpus else 'or write cpu or auto'}"
            for where, section in lacking.items()
        ]
    claims = [claim for claim in gpu_claims(recipe.inference, recipe.policies) if claim.node == 0]
    missing = {claim.where: [gpu for gpu in claim.gpus if gpu >= len(memory_gib)] for claim in claims}
    return [
        f"{where} names GPU {', '.join(map(str, gpus))}, but this machine has the GPUs 0 to {len(memory_gib) - 1}: write those "
        "(`nvidia-smi -L` lists them)"
        for where, gpus in missing.items()
        if gpus
    ]


def smaller_cards(recipe: Recipe, memory_gib: Sequence[float]) -> Recipe | None:
    """The recipe with the memory of this machine's smallest GPU of node 0, to be estimated again; None if that is enough."""
    claims = [claim for claim in gpu_claims(recipe.inference, recipe.policies) if claim.node == 0]
    claimed = [memory_gib[gpu] for claim in claims for gpu in claim.gpus if gpu < len(memory_gib)]
    if not claimed or min(claimed) >= _TOLD_SHARE * recipe.launch.gpu_memory_gib:
        return None
    launch = recipe.launch.model_copy(update={"gpu_memory_gib": float(int(min(claimed)))})
    return recipe.model_copy(update={"launch": launch})
