"""Wrong inputs of new users: a recipe's settings and files, with the parts that the message about each must have.

``WRONG`` is the table. An input is refused with a ``ConfigError``, or, where it may be meant, told before "is ready to run".
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

HEADER = b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}'
TEMPLATE = "{%- for m in messages -%}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endfor -%}<|im_start|>assistant\n"
ROWS = [{"id": str(i), "problem": f"What is {i} plus {i}?", "answer": str(2 * i)} for i in range(12)]
REWARDS = """
constant = 5
def exact(task, completion): return float(completion == task["answer"])
def one(completion): return 1.0
def lacks(task, completion): return float(completion == task["solution"])
def nothing(task, completion): float(completion == task["answer"])
def text(task, completion): return "right"
def divides(task, completion): return 1 / len(completion)
def rows(seed): yield from [{"problem": "a", "answer": "b"}]
def raising_rows(seed): raise ValueError("no such file")
def endless(seed):
    while True: yield {"problem": "a", "answer": "b"}
class NoFlow: pass
def boxed(task, completion): return float(completion == r"\\boxed{%s}" % task["answer"])
def never(task, completion): return 0.0
def number(task, completion): return float(int(completion or 0) > 10**9)
def words(task, completion): return float(len(completion.split()))
def needs(task, completion): return float(task["unit_tests"] == completion)
"""

GRADED = """
import rollmill
class Graded(rollmill.Workflow):
    async def run(self, task, context):
        chat = self.converse(task, context)
        await chat.respond()
        return chat.outcome(await chat.grade())
"""


@dataclass(frozen=True)
class Wrong:
    """``told``: parts of the message. ``settings``: by path, over the good recipe. ``files``: written beside it; None removes
    one. ``edit``: changes the text of the recipe."""

    name: str
    told: Sequence[str]
    settings: Mapping[str, Any] = field(default_factory=dict)
    files: Mapping[str, bytes | str | None] = field(default_factory=dict)
    edit: Callable[[str], str] | None = None
    overrides: Sequence[str] = ()


def write_good(folder: Path) -> None:
    """A recipe that passes, with a model of random bytes, a true tokenizer, rows and rewards."""
    from services.common.tiny import train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(
        ["What is 1 plus 2?"], vocabulary=300, special_tokens=["<|im_start|>", "<|im_end|>"], chat_template=TEMPLATE
    )
    tokenizer.save_pretrained(folder / "model")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "max_position_embeddings": 1024,
        "vocab_size": 300,
        "model_type": "qwen3",
    }
    (folder / "model" / "config.json").write_text(json.dumps(config))
    (folder / "model" / "model.safetensors").write_bytes(struct.pack("<Q", len(HEADER)) + HEADER + bytes(8))
    (folder / "rows.jsonl").write_text(lines(ROWS))
    (folder / "my_rewards.py").write_text(REWARDS)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(GOOD, sort_keys=False))


def lines(rows: Sequence[Any]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


GOOD: dict[str, Any] = {
    "extends": "base",
    "name": "mine",
    "policies": {
        "model0": {
            "model": {"path": "./model", "context_length": 128},
            "batch": {"size": 64},
            "trainer": {"port": 0},
            "weights": {"port": 0},
        }
    },
    "workflow": {"name": "single_turn", "settings": {"reward": "my_rewards:exact"}},
    "data": {"train": {"path": "./rows.jsonl"}},
    "evaluation": {"at_start": False, "at_end": False},
    "orchestrator": {"port": 0},
    "inference": {"a": {"port": 0}},
    "envgateway": {"port": 0},
}
MODEL, TRAIN, REWARD = "policies.model0.model.path", "data.train", "workflow.settings.reward"
CONFIG, TOKENIZER, WEIGHTS = "model/config.json", "model/tokenizer_config.json", "model/model.safetensors"
OPTIMIZER, BATCH = "policies.model0.optimizer", "policies.model0.batch"
HELD_OUT = {"data.evaluation": {"held_out": {"path": "./rows.jsonl"}}}


def rows(name: str, told: Sequence[str], content: bytes | str, file: str = "rows.jsonl", **settings: Any) -> Wrong:
    return Wrong(name, told, {"data.train": {"path": f"./{file}", **settings}}, {file: content})


def reward(name: str, path: Any, *told: str, files: Mapping[str, bytes | str | None] | None = None) -> Wrong:
    return Wrong(name, told, {REWARD: path}, files or {})


def setting(path: str, value: Any, *told: str) -> Wrong:
    return Wrong(f"{path} {value}", told or (path,), {path: value})


def template(name: str, text: str, *told: str) -> Wrong:
    return Wrong(name, told, files={"model/chat_template.jinja": text})


WRONG = [
    # -- the model
    Wrong("no model directory", (MODEL, "nowhere", "model directory"), {MODEL: "./nowhere"}),
    Wrong("model is a file", (MODEL, "rows.jsonl", "no directory"), {MODEL: "./rows.jsonl"}),
    Wrong("no config.json", (MODEL, "holds no config.json"), files={CONFIG: None}),
    Wrong("config.json a list", (MODEL, "no JSON object"), files={CONFIG: "[]"}),
    Wrong("no tokenizer", (MODEL, "holds no tokenizer_config.json"), files={TOKENIZER: None}),
    Wrong("no weights", (MODEL, "holds no weights"), files={WEIGHTS: None}),
    Wrong("pickled weights", (MODEL, "pickled", "convert"), files={WEIGHTS: None, "model/pytorch_model.bin": b"x"}),
    Wrong("no chat template", (MODEL, "no chat template", "chat_template.jinja"), files={"model/chat_template.jinja": None}),
    template("template with a syntax error", "{% for m in messages %}", MODEL, "chat template", "fails"),
    template("template that refuses", "{{ raise_exception('no system') }}", MODEL, "chat template", "no system"),
    template("template without the assistant", "{{ messages[0].content }}", MODEL, "does not show the content of assistant"),
    Wrong("gpt2 with its 1024 positions", (MODEL, "no chat template", "has 1024 positions", "at most 1024"),
          {"policies.model0.model.context_length": 4096},
          {CONFIG: '{"architectures": ["GPT2LMHeadModel"], "n_positions": 1024, "vocab_size": 50257}',
           "model/chat_template.jinja": None}),
    Wrong("an encoder", (MODEL, "BertForMaskedLM", "no causal language model"),
          files={CONFIG: '{"architectures": ["BertForMaskedLM"], "vocab_size": 300}'}),
    Wrong("another model's tokenizer", (MODEL, "tokens", "vocab_size of its config.json is 100"),
          files={CONFIG: '{"architectures": ["Qwen3ForCausalLM"], "vocab_size": 100}'}),
    Wrong("hub name with two slashes", (MODEL, "no name of the hub either"), {MODEL: "Qwen/Qwen3/0.6B"}),
    Wrong("hub name that does not exist", (MODEL, "Qwen/Qwen9-1B", "the hub has no model", "404"), {MODEL: "Qwen/Qwen9-1B"}),
    Wrong("hub name while the hub is away", (MODEL, "away/model", "cannot be asked", "hf download away/model"),
          {MODEL: "away/model"}),
    Wrong("data set that does not exist", ("data.train.path", "me/rows", "the hub has no dataset"),
          {TRAIN: {"path": "me/rows"}}),
    Wrong("no model at all", (MODEL, "missing", "warm_start.model0"), {"policies.model0.model": {"context_length": 128}}),
    # -- the rows
    Wrong("no such file", ("data.train.path", "nowhere.jsonl", "does not exist"), {TRAIN: {"path": "./nowhere.jsonl"}}),
    rows("empty file", (TRAIN, "holds no rows"), ""),
    rows("half of the rows broken", (TRAIN, "1 of 2 rows cannot be used", "row 2"), lines(ROWS[:1]) + "{\n"),
    rows("no prompt", (TRAIN, "row 1 has no prompt", "'text'"), lines([{"text": "a", "answer": "b"}])),
    rows("null prompts", (TRAIN, "row 1: problem is null"), lines([{"problem": None, "answer": "b"}])),
    Wrong("prompt_field that does not exist", (TRAIN, "looked for promt", "problem"),
          {"workflow.settings.prompt_field": "promt"}),
    Wrong("no answers for math", (TRAIN, "no answer", "ground_truth"), {REWARD: "math"}, {"rows.jsonl": lines([{"problem": "a"}])}),
    rows("a column that does not exist", (TRAIN, "columns.prompt", "'question'", "problem"), lines(ROWS),
         columns={"prompt": "question"}),
    rows("a column behind another", (TRAIN, "columns.messages instead"), lines([{"messages": "a", "x": "b"}]),
         columns={"prompt": "x"}),
    rows("an id that does not exist", (TRAIN, "no field 'uid'"), lines(ROWS), id_field="uid"),
    rows("every prompt too long", (TRAIN, "every prompt", "127 tokens", "context_length"),
         lines([{"problem": "long " * 400, "answer": "b"}])),
    rows("some prompts too long", (TRAIN, "1 of 13 prompts", "max_prompt_tokens: 127"),
         lines([*ROWS, {"problem": "long " * 400, "answer": "b"}])),
    Wrong("an unknown data set", (TRAIN, "'gsm9k'", "gsm8k"), {TRAIN: {"name": "gsm9k"}}),
    Wrong("no generator function", (TRAIN, "no 'row'", "rows"), {TRAIN: {"generator": "my_rewards:row"}}),
    Wrong("generator's setting", (TRAIN, "my_rewards:rows", "def rows(seed, split)"),
          {TRAIN: {"generator": "my_rewards:rows", "settings": {"split": "a"}}}),
    Wrong("generator that raises", (TRAIN, "my_rewards.py:", "raised ValueError", "no such file"), {TRAIN: {"generator": "my_rewards:raising_rows"}}),
    Wrong("evaluation without data", ("data.evaluation is missing", "hold_out", "at_start"), {"evaluation": {"at_start": True}}),
    Wrong("evaluation on training rows", ("12 of 12 tasks", "overlap with data.train"), HELD_OUT),
    # -- the reward
    reward("a misspelt reward", "maths", REWARD, "'maths'", "did you mean 'math'"),
    reward("a dot for a colon", "my_rewards.exact", REWARD, "did you mean 'my_rewards:exact'"),
    reward("no function", "my_rewards:exat", "no 'exat'", "exact", "my_rewards.py"),
    reward("no function but a number", "my_rewards:constant", "type int", "def reward(task, completion)"),
    reward("one argument", "my_rewards:one", "my_rewards.py:4", "def reward(task, completion)"),
    reward("a column that the rows lack", "my_rewards:lacks", "my_rewards.py:5", "KeyError: 'solution'", "id, problem, answer"),
    reward("no return", "my_rewards:nothing", "my_rewards.py:6", "returned None", "`return` missing"),
    reward("a word", "my_rewards:text", "returned 'right'", "finite number"),
    reward("fails on an empty answer", "my_rewards:divides", "my_rewards.py:8", "ZeroDivisionError", "an empty answer"),
    Wrong("the default reward without a gateway", (REWARD, "'math', its default", "envgateway is null"),
          {"workflow": {"name": "single_turn", "settings": {}}, "envgateway": None}),
    Wrong("a workflow of mine with the default reward and no gateway", (REWARD, "'math', its default", "envgateway"),
          {"workflow": {"name": "graded_flow:Graded", "settings": {}}, "envgateway": None}, {"graded_flow.py": GRADED}),
    Wrong("a workflow that runs programs without a gateway", ("workflow.settings.tools: python", "envgateway is null"),
          {"workflow": {"name": "tool_math", "settings": {"reward": "rewards:exact"}}, "envgateway": None}),
    Wrong("code without tests", (TRAIN, "no tests with a kind"), {REWARD: "code"}),
    # -- the workflow
    setting("workflow.name", "singel_turn", "workflow.name", "'singel_turn'", "single_turn"),
    setting("workflow.name", "my_rewards:NoFlow", "is no workflow", "my_rewards.py"),
    setting("workflow.settings.max_turns", 3, "workflow.settings.max_turns", "unknown key"),
    setting("workflow.settings.policy", "actor", "'actor'", "model0"),
    Wrong("an environment that is not there", ("workflow.settings.environment is 'chess'", "single_step", "textworld", "envgateway.environments"),
          {"workflow": {"name": "agent_env", "settings": {"environment": "chess"}}}),
    Wrong("a misspelt MCP server", ("'mcp:serch'", "did you mean 'mcp:search'"),
          {"workflow": {"name": "tool_use", "settings": {"tools": ["mcp:serch"], "reward": "math"}},
           "envgateway": {"mcp": {"search": {"command": ["true"]}}}}),
    Wrong("tasks of reasoning-gym graded as math", ("workflow.settings.reward: reasoning_gym",),
          {"data": {"train": {"reasoning_gym": "chain_sum"}}, "workflow": {"name": "single_turn", "settings": {}}}),
    Wrong("reasoning-gym's reward for other rows", ("no task of reasoning-gym", "name another reward"),
          {"workflow": {"name": "single_turn", "settings": {"reward": "reasoning_gym"}}}),
    Wrong("a size without reasoning-gym", ("size is 9", "write limit: 9"), {"data.train.size": 9}),
    Wrong("tasks of Harbor without their tests", ("data.train.harbor", "write workflow: {name: agent_env, settings: {environment: harbor}}"),
          {"data": {"train": {"harbor": "./tasks"}}, "workflow": {"name": "single_turn", "settings": {"reward": "math"}}}),
    Wrong("a gymnasium environment of a name that is taken", ("envgateway.gymnasium.webshop", "another name"),
          {"workflow": {"name": "agent_env", "settings": {"environment": "webshop"}},
           "envgateway": {"gymnasium": {"webshop": {"id": "FrozenLake-v1"}}}}),
    setting("modules", ["/nowhere"], "modules names /nowhere", "no directory"),
    Wrong("dialogues that are not there", ("warm_start.model0.dialogues", "nowhere.jsonl", "neither an existing file"),
          {"policies.model0.model": {"context_length": 128},
           "warm_start": {"model0": {"builder": "rollmill:tiny_model", "dialogues": "./nowhere.jsonl"}}}),
    # -- numbers
    setting(f"{OPTIMIZER}.lr", 1, f"{OPTIMIZER}.lr is 1", "at most 0.1"),
    setting(f"{OPTIMIZER}.betas", [1.0, 0.9], f"{OPTIMIZER}", "betas must lie in [0, 1)"),
    setting(f"{BATCH}.size", 63, f"{BATCH}.size is 63", "whole groups of 8", "56 or 64"),
    setting(f"{BATCH}.minibatches", 7, f"{BATCH}.minibatches is 7", "64", "4 or 8"),
    Wrong("pass@k beyond the group", ("pass_k (9)", "group_size (8)"),
          {"policies.model0.algorithm.pass_k": 9, "policies.model0.algorithm.advantage": "pass_at_k"}),
    setting("policies.model0.algorithm.pass_k", 4, "pass_k is 4, and advantage: grpo does not read it"),
    setting("sampling.min_new_tokens", 100, "min_new_tokens 100 exceeds max_new_tokens 64"),
    setting("inference.a.engine", "vlm", "inference.a.engine", "'vlm'", "torch"),
    Wrong("a group that no service can play", ("rollout.group_size is 128", "64 slots", "more slots"),
          {"rollout.group_size": 128, f"{BATCH}.size": 128}),
    Wrong("a warm-up longer than the run", ("warmup_updates is 1000", "the run has 100 updates"),
          {f"{OPTIMIZER}.warmup_updates": 1000}),
    Wrong("an evaluation's budget beyond the context", ("evaluation.samplings.greedy.max_new_tokens (500)", "(128)"),
          {**HELD_OUT, "evaluation": {"samplings": {"greedy": {"temperature": 0, "max_new_tokens": 500}}}}),
    setting("run.steps", 0, "run.steps is 0", "nothing to do"),
    setting("workflow.settings.max_prompt_tokens", 5, "5 tokens that workflow.settings.max_prompt_tokens allows"),
    # -- structure
    Wrong("a key twice", ("recipe.yaml:", "name is there twice", "line 2"), edit=lambda text: f"{text}name: other\n"),
    setting("num_generations", 8, "num_generations: unknown key", "rollout.group_size"),
    setting("policies.model0.model", "Qwen/Qwen3-0.6B", "policies.model0.model", "such as {path: Qwen/Qwen3-0.6B}"),
    # -- this machine
    setting("run.dir", "/proc/runs", "run.dir is /proc/runs", "cannot be written", "another directory"),
    Wrong("run.dir is a file", ("run.dir", "rows.jsonl is a file"), {"run.dir": "./rows.jsonl"}),
    Wrong("GPUs that are not here", ("NVIDIA GPU", "--profile tiny"), {"inference.a.gpus": [0]}),
    Wrong("vllm that is not installed", ("inference.a.engine is vllm", "not installed", "ROLLMILL_VLLM_PYTHON"), {"inference.a.engine": "vllm"}),
]  # fmt: skip


# --- mixtures of data

GOOD_SOURCE = {"path": "./rows.jsonl"}
OTHER = {"path": "./other.jsonl"}
OTHER_FILE = {"other.jsonl": lines(ROWS)}


def mixed(
    name: str, told: tuple[str, ...], *sources: Any, files: dict[str, bytes | str | None] | None = None, **more: Any
) -> Wrong:
    return Wrong(name, told, {TRAIN: list(sources), **more}, {**OTHER_FILE, **(files or {})})


def with_second(name: str, told: tuple[str, ...], **settings: Any) -> Wrong:
    """Two sources, the second one with these settings."""
    return mixed(name, told, GOOD_SOURCE, {**OTHER, **settings})


MIXTURES = [
    with_second("weight infinite", ("data.train.1.weight", "finite"), weight=float("inf")),
    with_second("source with a slash", ("data.train.1.source", "'a/b'", "letters, digits"), source="a/b"),
    with_second("reward of a source lacks a column", ("data.train.other, task 1", "my_rewards.py:", "KeyError: 'unit_tests'", "problem"),
                workflow={"settings": {"reward": "my_rewards:needs"}}),
    with_second("settings of a source's workflow", ("data.train.other.workflow.settings.rewrad", "unknown key", "'reward'"),
                workflow={"settings": {"rewrad": "my_rewards:exact"}}),
    Wrong("weight of the only dataset", ("train.weight", "several sources", "as a list"), {TRAIN: {**GOOD_SOURCE, "weight": 2}}),
    mixed("a list without sources", ("train is an empty list", "path: ./rows.jsonl")),
    mixed("two sources of one name", ("train.0 and train.1", "both called 'rows'", "source: NAME"), GOOD_SOURCE, GOOD_SOURCE),
    Wrong("sources as names", ("data.train.0", "such as {path: rows.jsonl}"), {TRAIN: ["rows.jsonl", "other.jsonl"]}),
    mixed("generator without an end", ("data.train.endless", "yields more than 1000000 rows", "limit"), GOOD_SOURCE,
          {"generator": "my_rewards:endless"}),
    Wrong("an element that the list lacks", ("data.train.4.weight", "a list of 2", "from 0 to 1"), {TRAIN: [GOOD_SOURCE, OTHER]},
          OTHER_FILE, overrides=["data.train.4.weight=2"]),
    Wrong("mixture and bit-exact runs", ("run.deterministic", "data.train mixes rows, other"),
          {TRAIN: [GOOD_SOURCE, OTHER], "run.deterministic": True}, OTHER_FILE),
    Wrong("advantage scale and token credit", ("data.train.1.advantage_scale is 2", "kl_reward_coefficient"),
          {TRAIN: [GOOD_SOURCE, {**OTHER, "advantage_scale": 2}], "policies.model0.algorithm": {"kl_reward_coefficient": 0.1}}, OTHER_FILE),
    Wrong("band upside down", ("pass_rate is [0.9, 0.1]", "lower share first"), {"data.curation": "pass_rate", "data.pass_rate": [0.9, 0.1]}),
    Wrong("band without its curation", ("pass_rate is", "curation: accept_all does not read it", "pass_rate"), {"data.pass_rate": [0.2, 0.8]}),
    Wrong("hold out more than there is", ("data.evaluation.h", "12 rows", "hold_out 50 leaves none"),
          {"data.evaluation": {"h": {**GOOD_SOURCE, "hold_out": 50}}}),
]  # fmt: skip
