"""``rollmill new``: writes the files of a first run into a folder: recipe, reward, rows and a README."""

from __future__ import annotations

import functools
import itertools
import json
import random
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from services.cli.check.memory import host_estimates, host_memory_bytes
from services.cli.check.models import positions
from services.cli.check.recipe import gpus_here
from services.common.config.data import DatasetConfig
from services.common.config.loading import load_recipe, validate
from services.common.dataset_rows import prompt_in
from services.common.errors import ConfigError, DatasetError

REWARDS = "rewards"
_TEMPLATES = Path(__file__).parent / "templates" / "new.txt"
_NUM_HELD_OUT = 120  # of the demo
_HOLD_OUT, _MOST_HELD_OUT, _LEAST_ROWS = 20, 200, 100  # every 20th row, at most 200 rows, of at least 100
_CONTEXT = 4096  # of a model that has as many positions or does not say
# On a machine without a GPU: contexts, of which the first is taken that fits into a share of the memory.
_CPU_CONTEXTS, _CPU_BATCH, _CPU_MEMORY_SHARE = (1024, 512, 256), 32, 0.75


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The files that the user has already; the demo replaces the others."""

    model: str | None = None  # a directory or a hub name
    data: str | None = None  # a file of rows, a dataset directory or a hub name
    prompt: str | None = None  # the column with the prompt, where it is not one that is looked for
    answer: str | None = None  # the column that the reward compares with


def write_new(folder: Path, wanted: Wanted) -> list[Path]:
    """Write the files and return their paths; the recipe is loaded once, so it is valid.

    Raises:
        ConfigError: the folder holds files, cannot be written, or its name cannot be that of a recipe.
    """
    name = folder.resolve().name
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise ConfigError(f"{folder}: the recipe gets the name of its folder: use letters, digits, '-', '_' and '.'")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} exists and is not empty: name a new folder")
    files = _files(folder, name, wanted)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written ({error.strerror}): name another folder") from None
    load_recipe(folder)
    return [folder / file for file in files]


def next_commands(folder: Path) -> list[tuple[str, str]]:
    """(command, purpose) of the next three commands."""
    here = shlex.quote(str(folder))
    return [
        (f"rollmill check {here}", "renders one prompt, calls the reward, compares the settings"),
        (f"rollmill run {here}", "trains; Ctrl-C interrupts, and the output says how to go on"),
        ("rollmill trajectories", "prints conversations of the newest run"),
    ]


def _files(folder: Path, name: str, wanted: Wanted) -> dict[str, str]:
    demo_rows, demo_model = wanted.data is None, wanted.model is None
    if demo_model and not demo_rows:
        raise ConfigError("--data needs --model: the demo's model knows the demo's rows only")
    every, _ = held_out(wanted)
    on_cpu = not demo_model and not gpus_here()
    longest = _cpu_context(_from(folder, wanted.model or "")) if on_cpu else _CONTEXT
    context = min(longest, positions(wanted.model or "") or longest)
    parts = re.split(r"^=== (\w+)\n", _TEMPLATES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    texts = {section: text.removesuffix("\n") for section, text in zip(parts[1::2], parts[2::2], strict=True)}
    values = {
        "NAME": name,
        "HERE": shlex.quote(str(folder)),
        "REWARDS": REWARDS,
        "STEPS": "20" if demo_model else "50" if on_cpu else "200",
        "BATCH": str(_CPU_BATCH) if on_cpu else "128",
        "TRAINER": f"{{port: 0, token_budget: {context}}} # tokens computed at once" if on_cpu else "{port: 0}",
        "MODEL": texts["DEMO_MODEL"] if demo_model else texts["OWN_MODEL"],
        "MODEL_PATH": _quoted(_from(folder, wanted.model or "")),
        "CONTEXT": str(context),
        "DATA": texts["DEMO_DATA"] if demo_rows else texts["OWN_DATA"] if every is None else texts["SPLIT_DATA"],
        "TRAIN": _train(folder, wanted, every),
        "EVERY": str(every),
        "HELD_OUT": f"one row in {every}",
        "EVALUATION": (
            "{every: 5} # training steps"
            if demo_rows
            else "{at_start: false, at_end: false}"
            if every is None
            else "{every: 20} # training steps"
        ),
        "NEW_TOKENS": "4" if demo_model else str(min(256 if on_cpu else 1024, context // 2)),
        "INFERENCE": "{port: 0, device: cpu}" if demo_model else "{port: 0} # engine: sglang for models of 1B and more",
        "WARM_START": texts["WARM_START"] if demo_model else "",
        "ROWS": texts["DEMO_ROWS"] if demo_rows and demo_model else "",
        "RUN": "about half a minute on two CPU cores" if demo_model else "Ctrl-C interrupts it",
        "NEXT": texts["DEMO_NEXT"] if demo_rows else texts["OWN_NEXT"] if every is None else texts["SPLIT_NEXT"],
    }
    files = {"recipe.yaml": texts["RECIPE"], f"{REWARDS}.py": texts["REWARDS"], "README.md": texts["README"]}
    if demo_model:
        files["demo.py"] = texts["DEMO"]
    for _ in range(2):  # values hold further names
        files = {file: re.sub(r"@([A-Z_]+)@", lambda found: values[found[1]], text) for file, text in files.items()}
    if demo_rows:
        orders = itertools.permutations(range(10), 3)
        rows = [{"problem": f"Largest of {' '.join(map(str, each))}?", "answer": str(max(each))} for each in orders]
        random.Random(0).shuffle(rows)
        for file, part in {"train.jsonl": rows[_NUM_HELD_OUT:], "held_out.jsonl": rows[:_NUM_HELD_OUT]}.items():
            files[file] = "".join(f"{json.dumps(row)}\n" for row in part)
    return files


def _cpu_context(model: str) -> int:
    """The context with which a model can be trained in this machine's memory; the smallest where none fits."""
    for context in _CPU_CONTEXTS:
        policy = {"model": {"path": model, "context_length": context}, "trainer": {"token_budget": context}}
        tree = {"name": "new", "policies": {"model0": {**policy, "batch": {"size": _CPU_BATCH}}}}
        tree |= {"data": {"train": {"path": "rows"}}, "evaluation": {"at_start": False, "at_end": False}}
        found = host_estimates(validate(tree, source="new"), has_gpus=False).get(0)
        if found is None or found.total_bytes < _CPU_MEMORY_SHARE * host_memory_bytes():
            break
    return context


def held_out(wanted: Wanted) -> tuple[int | None, str]:
    """``data.train.hold_out`` for the user's rows, about 5% of them and at most ``_MOST_HELD_OUT``, and a line about it; None
    and no line for the demo's rows, None for too few rows. Raises ``ConfigError`` for a file that cannot be read."""
    if wanted.data is None:
        return None, ""
    num_rows = _num_rows(wanted)
    if num_rows is None:
        return (
            _HOLD_OUT,
            f"a part of the rows is held out for evaluation: one row in {_HOLD_OUT} (hold_out: {_HOLD_OUT})",
        )
    if num_rows < _LEAST_ROWS:
        few = "1 row is" if num_rows == 1 else f"{num_rows} rows are"
        return None, f"{few} too few to hold some out: the run evaluates nothing (name other rows in data.evaluation)"
    every = max(_HOLD_OUT, -(-num_rows // _MOST_HELD_OUT))
    told = (
        f"{num_rows // every} of {num_rows:,} rows are held out for evaluation: one row in {every} (hold_out: {every})"
    )
    return every, told


def _num_rows(wanted: Wanted) -> int | None:
    """Rows of a file; None for a directory or a name on the hub. Raises ``ConfigError`` for a file that does not exist, that
    cannot be read, or whose first row has no prompt or lacks a column that is named."""
    from services.orchestrator.tasks.datasets import is_file_of_rows

    path = Path(wanted.data or "").expanduser()
    if path.is_file():
        return _rows_of(str(path), tuple(_columns(wanted).items()))
    if is_file_of_rows(str(path)):
        raise ConfigError(f"--data: {path.absolute()} does not exist: name an existing file, or a dataset on the hub")
    return None


@functools.cache
def _rows_of(path: str, columns: tuple[tuple[str, str], ...]) -> int:
    from services.orchestrator.tasks.datasets import open_source
    from services.orchestrator.tasks.rows import ListRows, renamed_rows

    try:
        rows = open_source(DatasetConfig(path=path), seed=0)
    except DatasetError as error:
        raise ConfigError(f"--data: {error.message}") from None
    try:
        prompt_in(renamed_rows(ListRows([rows[0].data], path), dict(columns))[0], None, "row 1")
    except DatasetError as error:
        raise ConfigError(f"--data: {error.message}: name the columns with --prompt and --answer") from None
    return len(rows)


def _columns(wanted: Wanted) -> dict[str, str]:
    return {name: column for name, column in (("prompt", wanted.prompt), ("answer", wanted.answer)) if column}


def _train(folder: Path, wanted: Wanted, every: int | None) -> str:
    """The section of the training data, as YAML on one line; ``every``: ``hold_out``."""
    columns = _columns(wanted)
    mapped = ", ".join(f"{name}: {_quoted(column)}" for name, column in columns.items())
    path = _quoted(_from(folder, wanted.data or ""))
    parts = [f"path: {path}", *([f"columns: {{{mapped}}}"] if columns else [])]
    return f"{{{', '.join([*parts, *([f'hold_out: {every}'] if every else [])])}}}"


def _from(folder: Path, path: str) -> str:
    """A local path as the recipe writes it: absolute, because the recipe lies in another folder; hub names as they are."""
    place = Path(path).expanduser()
    if place.exists():
        return str(place.resolve())
    if path.startswith(("/", ".", "~")):
        raise ConfigError(f"{path} does not exist: name an existing file or directory, or a hub name")
    return path


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9/][\w/.-]*", text) else json.dumps(text)
