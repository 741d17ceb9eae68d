"""Claims a directory for a new run and writes its resolved recipe, or opens the directory of a run to resume."""

from __future__ import annotations

import fnmatch
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from services.cli.check.recipe import check_launch, check_named, on_this_machine
from services.cli.console import say
from services.cli.inspect.checkpoints import Recorded
from services.cli.inspect.run_state import check_can_go_on, ended, launcher_lock, processes_left
from services.cli.inspect.standing import NOT_BEGUN, Standing, newest_first, standing
from services.cli.keys import operate
from services.cli.plan import other_nodes, ports_in_use, taken_ports, with_addresses, with_free_ports
from services.cli.profiles import load_with_profile
from services.common import run_files
from services.common.config.loading import (
    RESOLVED,
    apply_override,
    load_resolved,
    save_resolved,
    set_at,
    validate,
    with_run_id,
)
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.net.hosts import is_loopback
from services.common.security.keys import VARIABLE
from services.common.telemetry.logs import without_passwords
from services.orchestrator.config import RunLock, Settings


def replaceable(recipe: Recipe, run_dir: Path) -> set[str]:
    """Settings with a port that the launch chose and may choose again: of a run on this machine alone, because processes of
    other nodes know its ports, and only when no process of an earlier launch is left that may hold them."""
    if other_nodes(recipe) or processes_left(run_dir):
        return set()
    return set(recipe.launch.chosen_ports)


def with_other_ports(recipe: Recipe, run_dir: Path, console: Console) -> Recipe:
    """The recipe with a free port for every replaceable one that is taken, saved in the run's directory.

    The caller holds the launcher's lock of the run.
    """
    candidates = replaceable(recipe, run_dir)
    taken = {where: port for where, port in taken_ports(recipe) if where in candidates}
    if not taken:
        return recipe
    tree: dict[str, Any] = recipe.model_dump(mode="json")
    for where in taken:
        set_at(tree, where.split("."), 0)
    moved = with_free_ports(Recipe.model_validate(tree))
    save_resolved(moved, run_dir)
    now = dict(moved.ports())
    for where, port in taken.items():
        say(console, f"{where}: another program has taken port {port}; the run goes on with port {now[where]}")
    return moved


RELEASE_S = 5.0  # beyond launch.stop_grace_s: for the processes of a launch that is ending
_LOOK_S = 0.2
_NAMES = 100  # tried for a run that has none


def prepare(recipe: Recipe) -> tuple[Recipe, Path]:
    """Choose id, addresses, ports and directory of a new run and save the resolved recipe there.

    A run without a name gets another one if a second run starts in the same second.

    Raises ``ConfigError`` when the directory exists already or cannot be written, a port is taken, the keys of
    ``ROLLMILL_KEYS`` cannot be used, or other nodes could not reach this one.
    """
    named = bool(recipe.run.id)
    first = recipe = with_free_ports(with_addresses(with_run_id(recipe)))
    if taken := ports_in_use(recipe):
        raise ConfigError("\n".join(taken))
    if recipe.security.tls != "off" and (given := os.environ.get(VARIABLE)):
        operate(Path(given))  # before a directory is there that would be in the way of the next try
    for number in range(2, 2 if named else _NAMES):
        if (run_dir := _claim(recipe)) is not None:
            return recipe, run_dir
        run = first.run.model_copy(update={"id": f"{first.run.id}-{number}"})
        recipe = first.model_copy(update={"run": run})
    if (run_dir := _claim(recipe)) is None:
        raise ConfigError(
            f"{_directory(recipe)} holds a run already: choose another name with --set run.id=NAME, "
            f"or go on with it: rollmill run --resume {_directory(recipe)}"
        )
    return recipe, run_dir


def _directory(recipe: Recipe) -> Path:
    return (Path(recipe.run.dir) / str(recipe.run.id)).resolve()


def _claim(recipe: Recipe) -> Path | None:
    """The run's directory, with the resolved recipe; None when there is one already.

    Of two concurrent callers, one gets the directory.
    """
    run_dir = _directory(recipe)
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / RESOLVED).touch(exist_ok=False)
        try:
            save_resolved(recipe, run_dir)
        except OSError:
            (run_dir / RESOLVED).unlink()  # or the next try would find a run that is none
            raise
    except FileExistsError:
        return None
    except OSError as error:
        raise ConfigError(
            f"{run_dir} cannot be written ({error.strerror}): free some space or correct its permissions, or name another directory with "
            "--set run.dir=DIRECTORY"
        ) from None
    return run_dir


def reopen(run_dir: Path, console: Console | None = None, wait_s: float | None = None) -> tuple[Recipe, Path]:
    """The resolved recipe of a run that is to continue.

    Waits for processes of the previous launch that are still ending: ``launch.stop_grace_s`` and ``RELEASE_S`` unless
    ``wait_s`` says otherwise, because a launcher gives them as long.

    Raises ``ConfigError`` for a run that has ended, or whose launcher, orchestrator or ports are still active.
    """
    recipe = load_resolved(run_dir)
    check_can_go_on(run_dir)
    limit_s = recipe.launch.stop_grace_s + RELEASE_S if wait_s is None else wait_s
    deadline = time.monotonic() + limit_s
    told = False
    while held := _held(recipe, run_dir):
        if time.monotonic() >= deadline:
            raise ConfigError(
                "\n".join(
                    [
                        *held,
                        f"is the run still going? (rollmill watch {run_dir}) Else stop the processes that hold its directory and ports",
                    ]
                )
            )
        if console is not None and not told:
            say(console, f"waiting up to {limit_s:.0f} s for the launch before to end: {'; '.join(held)}")
            told = True
        time.sleep(_LOOK_S)
    check_can_go_on(run_dir)  # it may have ended meanwhile
    return recipe, run_dir.resolve()


def _held(recipe: Recipe, run_dir: Path) -> list[str]:
    """Resources that an earlier launch of a run still holds, one line each."""
    # The orchestrator's is not touched while a launcher may be starting one: a look holds the lock for an instant.
    holder = launcher_lock(run_dir).held_by() or RunLock(Settings(run_dir).lock_file).held_by()
    held = [f"{run_dir} is in use ({holder})"] if holder else []
    replaced = replaceable(recipe, run_dir)
    # It keeps the others, so other ones are no advice.
    return held + [f"{where}: port {port} is in use" for where, port in taken_ports(recipe) if where not in replaced]


# Pattern of a setting's path -> the reason for which it cannot change. The first that fits counts.
_FIXED = {
    "name": "it is the name of the run",
    "run.id": "it is the name of the run's directory",
    "run.dir": "the run lies there: move its directory and name the new place instead",
    "run.seed": "tasks and rollouts of the run were drawn with it",
    "run.deterministic": "what is recorded was played with or without it",
    "run.lockstep": "versions were published with or without it",
    "warm_start.*": "the starting checkpoint was made with it",
    "policies.*.model.*": "the checkpoints of the run are of this model and its context",
    "policies.*.adapter*": "the checkpoints of the run have, or lack, it",
    "policies.*.trained": "the journal has a ledger for each trained policy",
    "policies.*.algorithm.name": "recorded batches are replayed with the loss that trained them",
    "policies.*.algorithm.advantage": "recorded groups carry statistics of it",
    "policies.*.algorithm.value_head*": "the checkpoints of the run have, or lack, its weights",
    "policies.*.algorithm.distillation*": "recorded sequences have, or lack, the teacher's scores",
    "policies.*.trainer.master_dtype": "the checkpoints of the run have this type",
    "policies.*.weights.publish_dtype": "published versions have this type",
    "policies.*.batch.max_staleness": "",
    "policies.*.batch.max_token_age": "",
    "policies.*.batch.late*": "",
    "policies.*.batch.*": "recorded batches were made by it",
    "sampling.max_new_tokens": "",
    "sampling.*": "recorded log-probabilities are of tokens that were drawn with it",
    "rollout.group_size": "task groups of the run have this many rollouts",
    "rollout.policies": "task groups of the run were played so",
    "data.*.path": "",
    "data.*.columns*": "",
    "data.*.max_prompt_tokens": "",
    "data.*": "the order of the run's tasks follows from it",
    "evaluation.samplings*": "evaluations of the run are compared with each other",
    "evaluation.policies": "evaluations of the run are compared with each other",
    "security.*": "the run's keys were made for it",
}
# Settings that change the bits of a training step: those since the newest checkpoint are trained again, and must give the
# versions that are published (their digests are in the ledger, and a replica takes no other).
_OF_A_STEP = ("policies.*.optimizer.*", "policies.*.algorithm.*", "policies.*.batch.*", "policies.*.trainer.*")
_OF_NO_STEP = ("policies.*.trainer.checkpoint_every", "policies.*.trainer.keep_checkpoints", "policies.*.trainer.*port",
               "policies.*.trainer.max_mismatch")  # fmt: skip


def with_changes(
    recipe: Recipe, run_dir: Path, overrides: Sequence[str]
) -> tuple[Recipe, dict[str, tuple[object, object]]]:
    """The recipe of a run with overrides, and the settings that change: path -> (former value, new value). Writes nothing.

    Raises:
        ConfigError: an override is not valid, or changes what may not change, with one line for each.
    """
    tree = recipe.model_dump(mode="json")
    before = dict(leaves(tree))
    for override in overrides:
        apply_override(tree, override)
    found = standing(run_dir)
    wanted = dict(leaves(tree))
    touched = [path for path in sorted(before.keys() | wanted.keys()) if before.get(path) != wanted.get(path)]
    begun = found.state != NOT_BEGUN
    refused = [f"{path} cannot change in a run: {why}" for path in touched if (why := _why_fixed(path, begun))]
    if (again := _trained_again(recipe, found)) and not refused:
        refused = [f"{path} cannot change now: {again}" for path in touched if _changes_steps(path, recipe)]
    if refused:
        raise ConfigError(
            f"{run_dir} keeps these settings:\n"
            + "\n".join(f"  {line}" for line in refused)
            + "\n  Start another run for them"
        )
    changed = with_free_ports(validate(tree, source=str(run_dir)))
    newest = max(found.steps.values(), default=0)
    if changed.run.steps < newest:
        raise ConfigError(
            f"run.steps is {changed.run.steps}, and {run_dir} has trained {newest} steps: write {newest} or more"
        )
    after = dict(leaves(changed.model_dump(mode="json")))
    changes = {
        path: (before.get(path), after.get(path))
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }
    return changed, changes


def _changes_steps(path: str, recipe: Recipe) -> bool:
    """Whether a setting changes the result of a training step."""
    if path == "run.steps":  # the schedules of optimizers span the run
        optimizers = [policy.optimizer for policy in recipe.trained_policies.values()]
        return any(each.schedule != "constant" and each.total_updates is None for each in optimizers)
    if any(fnmatch.fnmatchcase(path, pattern) for pattern in _OF_NO_STEP):
        return False
    return any(fnmatch.fnmatchcase(path, pattern) for pattern in _OF_A_STEP)


def _trained_again(recipe: Recipe, found: Standing) -> str:
    """Why no training step may change, if a launch would train recorded batches again; else empty."""
    for policy in recipe.trained_policies:
        durable = found.checkpoints.get(policy, 0)
        published = Recorded.read(found.run_dir, policy, after=sys.maxsize).newest_version
        again = max(published, found.steps.get(policy, 0)) - durable
        if again > 0:
            return (
                f"{again} steps of {policy} after its newest checkpoint ({f'step {durable}' if durable else 'there is none'}) are "
                "trained again, and must give the versions that are published. Go on without this change, interrupt with "
                "Ctrl-C, which writes a checkpoint, and change it then"
            )
    return ""


def save_changes(recipe: Recipe, run_dir: Path, changes: dict[str, tuple[object, object]]) -> None:
    """Write the changed recipe, and note what changed."""
    with run_files.changes(run_dir).open("a") as file:
        for path, (former, new) in changes.items():
            file.write(json.dumps({"time": time.time(), "setting": path, "from": former, "to": new}) + "\n")
    save_resolved(recipe, run_dir)


def _why_fixed(path: str, begun: bool) -> str:
    """The reason for which a setting keeps its value; empty where it may change. Before the run has begun, its name and place
    alone are fixed."""
    for pattern, why in _FIXED.items():
        if fnmatch.fnmatchcase(path, pattern):
            return why if begun or pattern in ("name", "run.id", "run.dir") else ""
    return ""


def leaves(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of every setting of a tree; an empty mapping is a value."""
    for key, value in tree.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{path}.")
        else:
            yield path, value


AUTO = "auto"
_TOLD = 5  # runs that are left alone, in the line that says so
# Name, place and description of a run, and what its launch wrote: they do not change its behaviour.
_NO_SETTINGS = ("run.id", "run.dir", "run.resume", "description", "launch.chosen_ports")


def choose(recipe: Recipe, *, asked: bool) -> tuple[Path | None, str]:
    """The run to continue with, or None to begin a new run, and the reason in one line. ``asked``: whether the command line says ``--resume auto``; else the recipe's ``run.resume`` counts."""
    if not asked and recipe.run.resume != AUTO:
        return None, ""
    why = "--resume auto" if asked else "run.resume: auto"
    runs = Path(recipe.run.dir)
    skipped: list[str] = []
    for run_dir in newest_first(runs, lambda resolved: resolved.stat().st_mtime_ns, recipe.run.id or "*"):
        verdict = _verdict(recipe, run_dir)
        if verdict == "":
            return run_dir, f"going on with {run_dir}, the newest run of {recipe.name} that has not ended ({why})"
        skipped += [f"{run_dir} is {verdict}"] if verdict is not None else []
    more = [f"and {len(skipped) - _TOLD} more"] if len(skipped) > _TOLD else []
    reasons = "; ".join([*skipped[:_TOLD], *more]) or f"there is none in {runs}"
    return None, f"beginning a new run, for no run of {recipe.name} can go on ({why}): {reasons}"


def _verdict(recipe: Recipe, run_dir: Path) -> str | None:
    """Why the run in a directory cannot go on as one of this recipe; empty if possible, None for another recipe's."""
    try:
        found = load_resolved(run_dir)
    except ConfigError as error:  # as another version or a full disk may have left it
        why = " ".join(line.strip() for line in error.message.splitlines()[:2])
        return f"left alone: {why}" if run_dir.name.startswith(recipe.name) else None
    if found.name != recipe.name:
        return None
    if state := ended(run_dir):
        return f"over ({state})"
    if found.run.id != run_dir.name:
        return f"left alone: its {RESOLVED} is that of run {found.run.id}"
    if not os.access(run_dir, os.W_OK | os.X_OK):
        return "left alone: it cannot be written"
    different = differences(found, recipe)
    if not different:
        return ""
    more = f", and {len(different) - 1} more" if len(different) > 1 else ""
    return f"left alone: {different[0]}{more}"


def differences(found: Recipe, wanted: Recipe) -> list[str]:
    """Settings of a run that differ from a recipe, in words. Settings that a launch fills in (free ports, addresses) do
    not count."""
    # Without passwords: the text goes to terminals and logs.
    there, here = (dict(leaves(without_passwords(each.model_dump(mode="json")))) for each in (found, wanted))
    return [
        f"{path} is {there.get(path)!r} there and {here.get(path)!r} here"
        for path in sorted(there.keys() | here.keys())
        if path not in _NO_SETTINGS and there.get(path) != here.get(path) and not _is_filled_in(path, here.get(path))
    ]


def _is_filled_in(path: str, wanted: Any) -> bool:
    key = path.rpartition(".")[2]
    return (key.endswith("port") and wanted == 0) or (key == "host" and isinstance(wanted, str) and is_loopback(wanted))


def opened(
    recipe: Path | None, resume: str | None, overrides: Sequence[str], profile: str | None, console: Console
) -> tuple[Recipe, Path]:
    """The resolved recipe and the directory of a new run, or of the one to go on with, checked either way.

    Raises:
        ConfigError: neither or both are named, the recipe cannot run, or the run cannot go on so.
    """
    if (recipe is None) != (resume not in (None, AUTO)):
        raise ConfigError(
            "name a recipe to start a run (with --resume auto to go on with its newest one that has not ended), or --resume RUN "
            "to go on with one; not both"
        )
    if recipe is None:
        if profile:
            raise ConfigError("a run that goes on keeps its profile: leave out --profile, or start another run")
        resolved, run_dir = reopen(Path(str(resume)), console)
        if overrides:
            resolved, changes = with_changes(resolved, run_dir, overrides)
            check_launch(resolved)
            check_named(resolved)
            save_changes(resolved, run_dir, changes)
            for setting, (former, new) in changes.items():
                say(console, f"{setting}: {former} -> {new}")
        return resolved, run_dir
    loaded = on_this_machine(load_with_profile(recipe, overrides, profile))
    before, why = choose(loaded, asked=resume == AUTO)
    if why:
        say(console, why)
    if before is not None:
        return reopen(before, console)
    check_launch(loaded)
    check_named(loaded)
    return prepare(loaded)
