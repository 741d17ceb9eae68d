"""Wrong inputs of mixtures of data, for the table of ``wrong_inputs``."""

from __future__ import annotations

import json
from typing import Any

from tests.unit.cli.wrong_inputs import ROWS, TRAIN, Wrong, lines

GOOD_SOURCE = {"path": "./rows.jsonl"}
OTHER = {"path": "./other.jsonl"}
OTHER_FILE = {"other.jsonl": lines(ROWS)}
TASKS = """
def endless(seed):
    while True: yield {"problem": "a", "answer": "b"}
def nothing(seed): yield from ()
def key_error(seed):
    yield {"problem": "a", "answer": "b"}
    raise KeyError("shard 7")
def needs(task, completion): return float(task["unit_tests"] == completion)
"""


def mixed(
    name: str, told: tuple[str, ...], *sources: Any, files: dict[str, bytes | str | None] | None = None, **more: Any
) -> Wrong:
    return Wrong(name, told, {TRAIN: list(sources), **more}, {**OTHER_FILE, "my_tasks.py": TASKS, **(files or {})})


def with_second(name: str, told: tuple[str, ...], **settings: Any) -> Wrong:
    """Two sources, the second one with these settings."""
    return mixed(name, told, GOOD_SOURCE, {**OTHER, **settings})


MIXTURES = [
    with_second("weight 0", ("data.train.1.weight", "0 is not valid", "greater than 0"), weight=0),
    with_second("weight below 0", ("data.train.1.weight", "-1", "greater than 0"), weight=-1),
    with_second("weight of text", ("data.train.1.weight", "'half'", "number"), weight="half"),
    with_second("weight infinite", ("data.train.1.weight", "finite"), weight=float("inf")),
    with_second("weight misspelt", ("data.train.1.wieght", "did you mean 'weight'?"), wieght=2),
    with_second("advantage scale 0", ("data.train.1.advantage_scale", "greater than 0"), advantage_scale=0),
    with_second("source with a slash", ("data.train.1.source", "'a/b'", "letters, digits"), source="a/b"),
    with_second("reward of a source that is not there", ("no module 'nowhere'",),
                workflow={"settings": {"reward": "nowhere:f"}}),
    with_second("reward of a source lacks a column", ("data.train.other, task 1", "my_tasks.py:", "KeyError: 'unit_tests'", "problem"),
                workflow={"settings": {"reward": "my_tasks:needs"}}),
    with_second("workflow of a source that is not there", ("no workflow 'singel_turn'", "single_turn"),
                workflow={"name": "singel_turn"}),
    with_second("settings of a source's workflow", ("data.train.other.workflow.settings.rewrad", "unknown key", "'reward'"),
                workflow={"settings": {"rewrad": "my_rewards:exact"}}),
    with_second("environment of a source that is not there", ("data.train.other.workflow.settings.environment", "'maze'", "write one of"),
                workflow={"name": "agent_env", "settings": {"environment": "maze"}}),
    with_second("column of a source that is not there", ("data.train.other", "columns.prompt", "'question'", "problem"),
                columns={"prompt": "question"}),
    with_second("samples of a source", ("train.other.samples_per_task is 4", "rollout.group_size"), samples_per_task=4),
    Wrong("weight of the only dataset", ("train.weight", "several sources", "as a list"), {TRAIN: {**GOOD_SOURCE, "weight": 2}}),
    mixed("a list without sources", ("train is an empty list", "path: ./rows.jsonl")),
    mixed("two sources of one name", ("train.0 and train.1", "both called 'rows'", "source: NAME"), GOOD_SOURCE, GOOD_SOURCE),
    Wrong("sources as names", ("data.train.0", "such as {path: rows.jsonl}"), {TRAIN: ["rows.jsonl", "other.jsonl"]}),
    mixed("source without rows", ("data.train.empty", "empty.jsonl holds no rows"), GOOD_SOURCE, {"path": "./empty.jsonl"},
          files={"empty.jsonl": ""}),
    mixed("source that is not there", ("data.train.gone.path", "gone.jsonl does not exist"), GOOD_SOURCE, {"path": "./gone.jsonl"}),
    mixed("source of another kind", ("data.train.0", "set exactly one of"), {"weight": 2}, GOOD_SOURCE),
    mixed("generator without an end", ("data.train.endless", "yields more than 1000000 rows", "limit"), GOOD_SOURCE,
          {"generator": "my_tasks:endless"}),
    mixed("generator that ends at once", ("data.train.nothing", "holds no rows"), GOOD_SOURCE, {"generator": "my_tasks:nothing"}),
    mixed("generator that raises later", ("data.train.key_error", "my_tasks.py:", "raised KeyError", "shard 7"), GOOD_SOURCE,
          {"generator": "my_tasks:key_error"}),
    mixed("parquet that is none", ("data.train.t", "t.parquet"), GOOD_SOURCE, {"path": "./t.parquet"}, files={"t.parquet": json.dumps(ROWS)}),
    Wrong("an element that the list lacks", ("data.train.4.weight", "a list of 2", "from 0 to 1"), {TRAIN: [GOOD_SOURCE, OTHER]},
          OTHER_FILE, overrides=["data.train.4.weight=2"]),
    Wrong("mixture and bit-exact runs", ("run.deterministic", "data.train mixes rows, other"),
          {TRAIN: [GOOD_SOURCE, OTHER], "run.deterministic": True}, OTHER_FILE),
    Wrong("advantage scale and token credit", ("data.train.1.advantage_scale is 2", "kl_reward_coefficient"),
          {TRAIN: [GOOD_SOURCE, {**OTHER, "advantage_scale": 2}], "policies.model0.algorithm": {"kl_reward_coefficient": 0.1}}, OTHER_FILE),
    Wrong("band upside down", ("pass_rate is [0.9, 0.1]", "lower share first"), {"data.curation": "pass_rate", "data.pass_rate": [0.9, 0.1]}),
    Wrong("band in percent", ("pass_rate is [5, 95]", "from 0 to 1"), {"data.curation": "pass_rate", "data.pass_rate": [5, 95]}),
    Wrong("band without its curation", ("pass_rate is", "curation: accept_all does not read it", "pass_rate"), {"data.pass_rate": [0.2, 0.8]}),
    Wrong("hold out more than there is", ("data.evaluation.h", "12 rows", "hold_out 50 leaves none"),
          {"data.evaluation": {"h": {**GOOD_SOURCE, "hold_out": 50}}}),
    Wrong("hold out every row", ("data.train.hold_out", "greater than or equal to 2"), {f"{TRAIN}.hold_out": 1}),
]  # fmt: skip
