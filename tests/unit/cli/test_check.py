"""``rollmill check`` finds the faults of a recipe and of the files that the recipe names, before any process starts."""

from __future__ import annotations

import importlib.util
import io
import json
import re
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from services.cli.__main__ import app
from services.cli.check.data import MAX_TEMPLATE, RUN, find_overlap, text_of, words_of
from services.cli.check.recipe import check_launch, check_recipe, describe, launch_problems
from services.cli.check.worlds import mcp_problems
from services.common.config.loading import load_recipe, validate
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.installing import install
from services.common.records import Task
from tests.unit.cli.wrong_inputs import GOOD

HEADER = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "tasks.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    program = {"problem": "Double it.", "tests": {"kind": "stdin", "cases": [{"stdin": "1", "expected": "2"}]}}
    (tmp_path / "programs.jsonl").write_text(json.dumps(program) + "\n")
    (tmp_path / "broken.jsonl").write_text("[1]\nnot json\n")
    (tmp_path / "mended.jsonl").write_text('{"problem": "1+1", "answer": "2"}\nnot json\n[1]\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).write_text("{}")
    (tmp_path / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER + bytes(8))
    path = tmp_path / "recipe.yaml"
    math = {"name": "single_turn", "settings": {"reward": "math"}}
    tree = {**GOOD, "name": "checked", "data": {"train": {"path": "./tasks.jsonl"}}, "workflow": math}
    path.write_text(yaml.safe_dump(tree))
    return path


def test_rows_that_are_left_out_are_told_and_refuse_nothing(recipe: Path) -> None:
    overrides = ["data.train.path=mended.jsonl", "data.evaluation.held_out.path=mended.jsonl"]
    overrides = [override.replace("mended", str(recipe.parent / "mended")) for override in overrides]
    left_out = check_recipe(load_recipe(recipe, overrides, {}))
    assert [line.partition(": row 2")[0] for line in left_out] == [
        "data.train: 2 of 3 rows cannot be used and are left out",
        "data.evaluation.held_out: 2 of 3 rows cannot be used and are left out",
        'data.evaluation.held_out: 1 of 1 tasks (100.0%) overlap with data.train: 1 word for word; 1 is training task 1: "1+1"',
    ]
    shown = CliRunner().invoke(app, ["check", str(recipe), "--set", overrides[0]])
    assert shown.exit_code == 0
    told = " ".join(shown.stdout.split())
    assert "data.train: 2 of 3 rows cannot be used and are left out: row 2: not valid JSON" in told
    assert "row 3: a row must be a JSON object, not list" in told


@pytest.mark.parametrize("section", ["workflow", "evaluation.workflow"])
@pytest.mark.parametrize("short", ["wall_time_s", "cpu_time_s"])
def test_a_case_time_above_the_sandboxes_is_refused_with_both_keys_and_values(
    recipe: Path, section: str, short: str
) -> None:
    settings = [f"{section}.name=codegen_verifier", f"{section}.settings={{reward: code, verifier: model0}}"]
    settings.append(f"data.train.path={recipe.parent}/programs.jsonl" if section == "workflow" else "run.seed=1")
    times = [f"envgateway.sandbox.{name}={5 if name == short else 6}" for name in ("wall_time_s", "cpu_time_s")]
    with pytest.raises(ConfigError) as caught:
        check_recipe(load_recipe(recipe, [*settings, *times], {}))
    told = f"{section}.settings.case_time_s is 6, but envgateway.sandbox.{short} is 5 "
    assert told in caught.value.message
    check_recipe(load_recipe(recipe, [*settings, *times, f"envgateway.sandbox.{short}=6"], {}))
    check_recipe(load_recipe(recipe, [*settings, *times, f"{section}.settings.case_time_s=5"], {}))


def test_a_taken_port_is_told_with_the_key_that_sets_it(recipe: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"orchestrator.port: port {port} is in use"):
            check_recipe(load_recipe(recipe, [f"orchestrator.port={port}"], {}))


def test_a_dataset_that_must_be_fetched_by_hand_is_told_before_anything_starts(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLMILL_DATA_ROOT", raising=False)
    overrides = ["data.evaluation.lcb.name=livecodebench-v5"]
    loaded = load_recipe(recipe, overrides, {})
    check_recipe(loaded)  # the recipe is valid; this machine cannot run it
    with pytest.raises(ConfigError) as caught:
        check_launch(loaded)
    for wanted in ("data.evaluation.lcb.name", "lcb_v5/test.jsonl", "hf download"):
        assert wanted in caught.value.message


def test_commands_are_shown_whole_and_name_no_port_that_is_not_known_yet(recipe: Path) -> None:
    output = io.StringIO()
    Console(file=output, width=80).print(describe(load_recipe(recipe, (), {})))
    shown = output.getvalue()
    assert "127.0.0.1:PORT" in shown
    assert ":0" not in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("workflow.settings.max_turnz=2", "workflow.settings.max_turnz: unknown key"),
        ("data.train.path=./nowhere.jsonl", "nowhere.jsonl does not exist"),
        ("policies.model1.batch.size=8", "'model1' is a policy of its own beside model0"),
    ],
)
def test_run_starts_nothing_that_check_would_refuse(recipe: Path, override: str, wanted: str) -> None:
    runs = recipe.parent / "runs"
    result = CliRunner().invoke(app, ["run", str(recipe), "--set", override, "--set", f"run.dir={runs}"])
    assert isinstance(result.exception, ConfigError)
    assert re.search(wanted, result.exception.message, re.MULTILINE), result.exception.message
    assert not runs.exists()


def test_a_loss_by_path_is_looked_for_and_not_imported(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked_losses.py").write_text("raise RuntimeError\n\n\ndef clipped(tokens, settings): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = "policies.model0.algorithm.name"
    check_recipe(load_recipe(recipe, [f"{name}=checked_losses:clipped"]))
    assert "checked_losses" not in sys.modules
    for path, told in (("checked_loss:clipped", "there is no module 'checked_loss'"), ("checked_losses:x", "no 'x'")):
        with pytest.raises(ConfigError, match=f"{name}: .*{told}"):
            check_recipe(load_recipe(recipe, [f"{name}={path}"]))


def test_every_import_path_that_leads_nowhere_is_told_with_its_key(recipe: Path) -> None:
    overrides = ["inference.a.engine=nowhere:Engine", "envgateway.environments={one: nowhere:One, two: json:Two}",
                 "envgateway.tools.paths=[nowhere:tool]", "envgateway.rewards=[nowhere:reward]"]  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        check_recipe(load_recipe(recipe, overrides, {}))
    keys = ("inference.a.engine", "envgateway.environments.one", "envgateway.environments.two",
            "envgateway.tools.paths[0]", "envgateway.rewards[0]")  # fmt: skip
    lines = [line.strip() for line in caught.value.message.splitlines()[1:]]
    assert [line.partition(": ")[0] for line in lines] == list(keys)


@pytest.mark.parametrize(
    ("row", "script", "refused", "told"),
    [
        ({"problem": "1+1", "answer": "2"}, "tool_use", "", "answered by the script of the replay engine"),
        ({"problem": "1+1"}, None, "task 1 has no reference for a scripted policy", ""),
        ({"problem": "1+1"}, "saying:say", "saying.py:2: the script of the replay engine raised KeyError", ""),
        ({"problem": "1+1", "capital": "Rome"}, "saying:say", "", "'Rome'"),
    ],
)
def test_the_profile_tiny_calls_the_script_for_a_row(
    recipe: Path, monkeypatch: pytest.MonkeyPatch, row: dict[str, str], script: str | None, refused: str, told: str
) -> None:
    (recipe.parent / "saying.py").write_text(
        "def say(cue):\n    return cue.task.data['capital']\ndef pay(task, text):\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(recipe.parent)
    monkeypatch.delitem(sys.modules, "saying", raising=False)
    (recipe.parent / "tasks.jsonl").write_text(json.dumps(row) + "\n")
    settings = ["--set", "workflow.settings.reward=saying:pay"]
    settings += [] if script is None else ["--set", f"inference.a.forced.script={script}"]
    result = CliRunner().invoke(app, ["check", str(recipe), "--profile", "tiny", *settings], env={"COLUMNS": "400"})
    if refused:
        assert isinstance(result.exception, ConfigError) and refused in result.exception.message
    else:
        assert told in " ".join(result.output.split()), result.output


def test_a_disk_on_which_a_run_would_wait_is_told(recipe: Path) -> None:
    loaded = load_recipe(recipe, ["orchestrator.min_free_bytes=1000000000000000", "run.dir=/tmp/not-there-yet/runs"])
    (told,) = [line for line in launch_problems(loaded) if "min_free_bytes" in line]
    assert told.startswith("run.dir /tmp/not-there-yet/runs: its disk has ")
    assert not [line for line in launch_problems(load_recipe(recipe)) if "min_free_bytes" in line]


# --- servers of tools

RAW = str(Path(__file__).parents[3] / "extras" / "mcp" / "tests" / "raw_server.py")


def with_servers(names: list[str], **server: Any) -> Recipe:
    return validate(
        {
            "name": "r",
            "policies": {"a": {"model": {"path": "none"}}},
            "data": {"train": {"path": "rows.jsonl"}},
            "evaluation": {"at_start": False, "at_end": False},
            "workflow": {"name": "tool_use", "settings": {"tools": names, "reward": "math"}},
            "envgateway": {"mcp": {"raw": {"command": [sys.executable, "-S", RAW], **server}}},
        },
        "r",
    )


@pytest.mark.needs("mcp")
@pytest.mark.parametrize(
    ("tools", "server", "told"),
    [
        (["mcp:raw"], {}, []),
        (["mcp:raw/echo"], {}, []),
        (["mcp:raw/ecco"], {}, ["no tool 'ecco'"]),
        (["mcp:raw"], {"tools": ["ecco"]}, ["envgateway.mcp.raw.tools names 'ecco'"]),
        (["mcp:raw"], {"command": [sys.executable, "-c", "raise SystemExit('no index')"]}, ["no index"]),
        (["mcp:raw"], {"command": [sys.executable, "-S", RAW, "--schema", '{"type": "object", "required": 1}']},
         ["the schema of the server's tool 2 is invalid"]),
        (["mcp:raw"], {"command": [], "url": "http://127.0.0.1:9/mcp"}, ["http://127.0.0.1:9/mcp"]),
    ],
)  # fmt: skip
def test_a_server_is_tried(tools: list[str], server: dict[str, Any], told: list[str]) -> None:
    problems = mcp_problems(with_servers(tools, **server))
    assert len(problems) == len(told)
    assert all(part in problem for part, problem in zip(told, problems, strict=True))


def test_a_missing_package_is_told_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "mcp" else found(name))
    (problem,) = mcp_problems(with_servers(["mcp:raw"]))
    assert install("mcp") in problem


# --- overlap of data

Matches = list[tuple[str, str, float]]


def found(training: list[str], evaluation: list[str]) -> Matches:
    """(evaluation task, training task, share), by numbers from 0."""
    overlaps = find_overlap(numbered(training), {"d": numbered(evaluation)})
    return [(seen.task_id, seen.training_task_id, round(seen.share, 3)) for seen in overlaps["d"]]


def numbered(texts: list[str]) -> list[tuple[str, str]]:
    return [(str(number), text) for number, text in enumerate(texts)]


def words(count: int, prefix: str = "w") -> list[str]:
    return [f"{prefix}{number}" for number in range(count)]


def test_equal_texts_are_found_whatever_their_case_punctuation_length_and_number() -> None:
    assert found(["What is 2+2 ?", "other"], ["what is $2 + 2$", "what is 2 + 3"]) == [("0", "0", 1.0)]
    task = " ".join(words(20))
    assert found([task], [task, "another", task]) == [("0", "0", 1.0), ("2", "0", 1.0)]
    assert found(["", "1"], ["", "2"]) == []


def test_a_task_with_half_of_its_runs_in_one_training_task_is_found() -> None:
    task = words(RUN + 9)  # ten runs
    assert found([" ".join(["a", *task[: RUN + 4], "b"])], [" ".join(task)]) == [("0", "0", 0.5)]
    assert found([" ".join(task[: RUN + 3]), " ".join(task[4 : RUN + 6])], [" ".join(task)]) == []
    assert found([" ".join(["a", *words(RUN - 1), "b"])], [" ".join(words(RUN - 1))]) == [], (
        "shorter ones must be equal"
    )


def test_a_template_of_the_evaluation_tasks_is_no_overlap_but_an_equal_text_is() -> None:
    tasks = [" ".join([*words(30), f"number {number}"]) for number in range(MAX_TEMPLATE + 2)]
    training = [" ".join([*words(30), f"number {number}"]) for number in (3, 77)]
    assert found(training, tasks) == [("3", "0", 1.0)]
    few = tasks[:MAX_TEMPLATE]
    assert len(found(training, few)) == MAX_TEMPLATE, "so many may be versions of one task"


def test_the_text_of_a_task_is_its_prompt_what_the_user_says_or_the_index_of_its_world() -> None:
    def text(**row: object) -> str:
        return text_of(Task(task_id="1", data=row))

    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    assert (text(problem="2+2?", answer="4"), text(messages=said)) == ("2+2?", "2+2?")
    assert text_of(Task(task_id="1", data={"mine": "2+2?", "problem": "other"}), "mine") == "2+2?"
    assert text(index=3, split="train") == '{"index":3,"split":"train"}'
    assert text(most=100) == "", "what such a row plays is drawn by seed"


def test_words_of_scripts_without_spaces_are_their_characters() -> None:
    assert words_of("求 x+y 的值。") == ["求", "x", "y", "的", "值"]


@pytest.fixture
def overlapping(tmp_path: Path) -> Path:
    row, other = {"problem": "Find m+n. " * 5, "answer": "2"}, {"problem": "1+1", "answer": "2"}
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in (other, row)))
    (tmp_path / "seen.jsonl").write_text(
        json.dumps({**row, "answer": "3"}) + "\n" + json.dumps({**row, "problem": "2"})
    )
    (tmp_path / "unseen.jsonl").write_text(json.dumps({**row, "problem": "What?"}))
    path = tmp_path / "recipe.yaml"
    data = {
        "train": {"path": "./train.jsonl"},
        "evaluation": {name: {"path": f"./{name}.jsonl"} for name in ("seen", "unseen")},
    }
    policy = {**GOOD["policies"]["model0"], "model": {"path": "org/model"}}
    math = {"name": "single_turn", "settings": {"reward": "math"}}
    path.write_text(yaml.safe_dump({**GOOD, "policies": {"model0": policy}, "data": data, "workflow": math}))
    return path


def test_check_tells_the_tasks_with_count_share_rows_and_text_and_refuses_nothing(overlapping: Path) -> None:
    """Review, defect 14."""
    [line] = check_recipe(load_recipe(overlapping))
    assert line.startswith("data.evaluation.seen: 1 of 2 tasks (50.0%) overlap with data.train: 1 word for word; ")
    assert '1 is training task 2: "Find m+n. Find m+n.' in line
    shown = CliRunner().invoke(app, ["check", str(overlapping)])
    assert shown.exit_code == 0
    assert "data.evaluation.seen: 1 of 2 tasks" in " ".join(shown.stdout.split())


@pytest.mark.parametrize(
    ("absent", "lines"),
    [
        (["train"], ["data.train: not on this machine yet, so it is not known whether evaluation tasks occur in the training data"]),
        (["unseen"], ["data.evaluation.seen: 1 of 2 tasks", "data.evaluation.unseen: not on this machine yet, so it is not known whether its"]),
        (["seen", "unseen"], ["data.evaluation.seen, data.evaluation.unseen: not on this machine yet, so it is not known whether their"]),
    ],
)  # fmt: skip
def test_what_could_not_be_compared_is_told(overlapping: Path, absent: list[str], lines: list[str]) -> None:
    sets = [f"data.{'' if name == 'train' else 'evaluation.'}{name}.path=org/{name}" for name in absent]
    found = check_recipe(load_recipe(overlapping, sets, {}))
    assert len(found) == len(lines) and all(map(str.startswith, found, lines)), found


def test_generated_training_tasks_are_those_of_the_runs_seed(tmp_path: Path, overlapping: Path) -> None:
    """Evaluation rows with the seed of the run's training rows are found; with the same `seed` in both sections they differ."""
    sets = ["data.train.path=null", "data.train.generator=services.common.tiny:sums", "data.train.limit=50"]
    sets += ["data.evaluation.seen.path=null", "data.evaluation.seen.generator=services.common.tiny:sums"]
    sets += ["data.evaluation.seen.limit=50", "run.seed=5", "data.evaluation.seen.seed=5"]
    [line] = check_recipe(load_recipe(overlapping, sets, {}))
    assert "50 of 50 tasks (100.0%)" in line
