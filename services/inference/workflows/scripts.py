"""Programs and test cases that a scripted policy writes for a row with ``tests``, right or wrong.

A row without a reference solution gets a program with a table of its cases' answers, if the table is short.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import json
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from services.common.config.data import WorkflowConfig, is_training, name_of
from services.common.config.processes import ForcedEngineConfig
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInWorkflow
from services.common.errors import ConfigError, DatasetError
from services.common.importing import check_call, load_object
from services.common.records import PlayedBy, Purpose, Task, part_for
from services.common.text.chat import Chat
from services.inference.workflows.registry import workflow_settings

MAX_TABLE_CHARS = 1500  # of a program with a table of its cases
MAX_CASE_CHARS = 400  # of a test case that is written out
Row = Mapping[str, Any]
Case = dict[str, Any]


def fenced(program: str, language: str = "python") -> str:
    newline = "" if program.endswith("\n") else "\n"
    return f"```{language}\n{program}{newline}```"


def right_program(row: Row) -> str | None:
    """The reference solution; without one a table of the cases; None when that would be long, or there are none."""
    solution = row.get("solution")
    if isinstance(solution, str) and solution.strip():
        return _unfenced(solution)
    tests: Row = row["tests"]
    if tests.get("kind") == "stdin":
        table = {str(case["stdin"]).strip(): str(case.get("expected", "")) for case in tests["cases"]}
        program = f"import sys\ntable = {table!r}\nprint(table[sys.stdin.read().strip()])\n"
    elif tests.get("kind") == "call" and str(tests["entry_point"]).isidentifier():
        by_arguments = {json.dumps(case["args"]): case["expected"] for case in tests["cases"]}
        program = (
            f"import json\ntable = {by_arguments!r}\n\n"
            f"def {tests['entry_point']}(*args):\n    return table[json.dumps(list(args))]\n"
        )
    else:
        return None
    return program if len(program) <= MAX_TABLE_CHARS else None


def broken_program(draw: random.Random) -> str:
    """A program that runs and gives no right answer."""
    return f"guess = {draw.randrange(10**8, 10**9)}\nprint(guess)\n"


def cases_of(row: Row, limit: int) -> list[Case]:
    """Up to ``limit`` short true cases, as a verifier is asked to write them."""
    tests: Row = row["tests"]
    found: list[Case] = []
    if tests.get("kind") == "stdin":
        found = [{"input": case["stdin"], "output": case.get("expected", "")} for case in tests["cases"]]
    elif tests.get("kind") == "call":
        found = [{"args": list(case["args"]), "expected": case["expected"]} for case in tests["cases"]]
    elif tests.get("kind") == "assert":
        found = _asserted(str(tests.get("tests", "")))
    return [case for case in found if len(json.dumps(case)) <= MAX_CASE_CHARS][:limit]


def falsified(case: Case) -> Case:
    """The same case with a wrong outcome."""
    name = "output" if "output" in case else "expected"
    truth = case[name]
    if isinstance(truth, bool):
        wrong: Any = not truth
    elif isinstance(truth, int | float):
        wrong = truth + 1
    elif isinstance(truth, str):
        wrong = f"{truth.rstrip()}1\n" if name == "output" else f"{truth}1"
    else:
        wrong = 1
    return {**case, name: wrong}


def _asserted(code: str) -> list[Case]:
    """Cases written as ``assert candidate(...) == value`` with plain values; other cases are skipped."""
    try:
        tree = ast.parse(code)
    except SyntaxError:
        return []
    found = []
    for node in ast.walk(tree):
        match node:
            case ast.Assert(
                test=ast.Compare(
                    left=ast.Call(func=ast.Name(id="candidate"), args=args, keywords=named),
                    ops=[ast.Eq()],
                    comparators=[expected],
                )
            ):
                with contextlib.suppress(ValueError, TypeError):
                    # Named arguments stand in the order of the parameters in the sets that use them.
                    given = [ast.literal_eval(part) for part in (*args, *(each.value for each in named))]
                    case = {"args": given, "expected": ast.literal_eval(expected)}
                    json.dumps(case)
                    found.append(case)
    return found


def _unfenced(text: str) -> str:
    lines = text.strip("\n").split("\n")
    if len(lines) > 2 and lines[0].startswith("```") and lines[-1].strip() == "```":
        return "\n".join(lines[1:-1]) + "\n"
    return text


# --- Generates a scripted policy's text: a script is a function from a ``Cue`` (the state of the rollout) to text.


Script = Callable[["Cue"], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTurn:
    """The text of one policy's earlier turn."""

    policy: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cue:
    """The state of a rollout when a policy's turn begins.

    ``prompt`` is the policy's whole prompt as text with the marks of the chat template. ``said`` has the earlier turns of all
    policies in this rollout, oldest first. ``settings`` are the workflow's, validated and with their defaults.
    """

    policy: str
    task: Task
    purpose: Purpose
    prompt: str
    said: tuple[EarlierTurn, ...]
    settings: Any
    right_share: float
    num_words: int
    seed: int  # of this rollout

    def random(self, topic: str = "") -> random.Random:
        """The random generator of this rollout for one topic; each call returns the same draws."""
        return random.Random(xxhash.xxh3_64_intdigest(f"{self.seed}/{topic}".encode()))

    def is_right(self, topic: str = "") -> bool:
        """Whether to answer right about ``topic``: True in ``right_share`` of the rollouts."""
        return self.random(f"right/{topic}").random() < self.right_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A script and the settings of its workflow."""

    script: Script
    settings: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptBook:
    """The scripts of a recipe by the rollout's purpose and dataset, with their settings."""

    parts: Mapping[PlayedBy, Part]
    right_share: float
    num_words: int
    seed: int


class Scene:
    """The state of one rollout for scripts, over all of its policies."""

    def __init__(self, task: Task, purpose: Purpose, seed: int, source: str = "") -> None:
        """``source``: of the task's order."""
        self._task = task
        self._purpose = purpose
        self._source = source
        self._seed = seed
        self.said: list[EarlierTurn] = []  # so far; a budget may have cut the texts

    def forced_ids(self, book: ScriptBook, policy: str, chat: Chat, prompt_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of the policy's next turn, with the end of the turn."""
        return (*chat.encode(self.text(book, policy, chat.decode(prompt_ids))), chat.end_of_turn_id)

    def text(self, book: ScriptBook, policy: str, prompt: str) -> str:
        """The text of the policy's next turn after a prompt."""
        part = part_for(book.parts, self._purpose, self._source)
        cue = Cue(
            policy=policy,
            task=self._task,
            purpose=self._purpose,
            prompt=prompt,
            said=tuple(self.said),
            settings=part.settings,
            right_share=book.right_share,
            num_words=book.num_words,
            seed=xxhash.xxh3_64_intdigest(f"{book.seed}/{self._seed}".encode()),
        )
        return part.script(cue)


# --- Random filler words: the reasoning of a scripted policy before its answer.


_TEXT = (
    "first we look at what is given and write it down then each step follows from the one before so the rest is known "
    "now compare both sides again and count what is left over to see that nothing was lost on the way"
)
_WORDS = _TEXT.split()
_NUM_WORDS = 8  # before an answer, different in each rollout


def reasoning(cue: Cue, topic: str = "") -> str:
    """``cue.num_words`` drawn words and a space; empty if the recipe grades with a function of its own, which may need the bare
    answer."""
    if not cue.num_words or ":" in str(getattr(cue.settings, "reward", "")):
        return ""
    draw = cue.random(f"words/{topic}/{len(cue.said)}")
    return " ".join(draw.choice(_WORDS) for _ in range(cue.num_words)) + ". "


# --- The answer of a scripted policy to a task of a dataset: the reference, or a wrong answer.


def answer(cue: Cue, *, right: bool, topic: str = "") -> str:
    """The whole of a turn that answers the task. ``DatasetError`` for a row without anything to compare with."""
    row = cue.task.data
    if isinstance(row.get("tests"), Mapping):
        program = right_program(row) if right else None
        program = broken_program(cue.random(f"program/{topic}")) if program is None else program
        return reasoning(cue, topic) + fenced(program)
    if "answer" in row:
        return reasoning(cue, topic) + written(cue, value(cue, right=right, topic=topic))
    if isinstance(row.get("solution"), str):
        return str(row["solution"]) if right else broken_program(cue.random(f"program/{topic}"))
    raise DatasetError(
        f"task {cue.task.task_id} has no reference for a scripted policy: looked for tests, answer and solution in "
        f"{sorted(row)}; name a script of your own in inference.<name>.forced.script"
    )


def value(cue: Cue, *, right: bool, topic: str = "") -> str:
    """The row's answer, or another one of its kind."""
    truth = str(cue.task.data["answer"]).strip()
    return truth if right else wrong_value(truth, cue.random(f"value/{topic}").randrange(1, 10))


def wrong_value(truth: str, step: int) -> str:
    """A wrong answer: a whole number ``step`` higher, else a large whole number that is no answer of a task.

    >>> wrong_value("12", 3), wrong_value("\\\\frac{1}{2}", 3)
    ('15', '90000003')
    """
    try:
        return str(int(truth) + step)
    except ValueError:
        return str(90_000_000 + step)


def written(cue: Cue, text: str) -> str:
    """A value in a box; the bare value where the recipe's own reward function gives the answer in a box less than the bare
    one."""
    path = str(getattr(cue.settings, "reward", ""))
    return text if ":" in path and _prefers_bare(path, cue.task.data) else boxed(text)


_bare: dict[str, bool] = {}  # by import path of a reward function


def _prefers_bare(path: str, row: Mapping[str, Any]) -> bool:
    if path not in _bare:
        function, truth = load_object(path), str(row["answer"]).strip()
        try:
            is_async = inspect.iscoroutinefunction(function)
            _bare[path] = not is_async and bool(function(row, truth) > function(row, boxed(truth)))
        except Exception:  # noqa: BLE001 - the user's code may raise any error; the rollout's own call reports the error
            _bare[path] = False
    return _bare[path]


def boxed(text: str) -> str:
    return rf"\boxed{{{text}}}"


def is_right(row: Mapping[str, Any], text: str) -> bool:
    """Whether a text that a script wrote gives the reference answer."""
    if isinstance(row.get("tests"), Mapping):
        program = right_program(row)
        return program is not None and fenced(program) in text
    if "answer" in row:
        truth = str(row["answer"]).strip()
        return boxed(truth) in text or text == truth
    return text == row.get("solution")


def speak(cue: Cue) -> str:
    """The script of ``single_turn``: the reference answer, or a wrong one."""
    return answer(cue, right=cue.is_right())


# --- Scripts of ``actor_verifier`` and ``codegen_verifier``: the number of earlier turns decides the role.


def solve_and_verify(cue: Cue) -> str:
    """``actor_verifier``: solutions, and between them a verdict tag."""
    if len(cue.said) != 1:
        return answer(cue, right=cue.is_right(f"attempt/{len(cue.said)}"), topic=str(len(cue.said)))
    approve = is_right(cue.task.data, cue.said[0].text) == cue.is_right("verdict")
    return f"{_thought(cue)}{reasoning(cue)}<verdict>{'approve' if approve else 'reject'}</verdict>"


def write_and_test(cue: Cue) -> str:
    """``codegen_verifier``: programs, and between them test cases as a fenced JSON list."""
    if len(cue.said) != 1:
        return answer(cue, right=cue.is_right(f"attempt/{len(cue.said)}"), topic=str(len(cue.said)))
    cases = cases_of(cue.task.data, int(getattr(cue.settings, "num_cases", 2)))
    if not cue.is_right("cases"):
        cases = [falsified(case) for case in cases]
    return f"{_thought(cue)}{reasoning(cue)}{fenced(json.dumps(cases), 'json')}"


def _thought(cue: Cue) -> str:
    """A thought before the text, if the recipe turns on the verifier's thinking."""
    if not getattr(cue.settings, "verifier_thinking", False):
        return ""
    return f"<think>\n{reasoning(cue, 'thought').strip()}\n</think>\n\n"


# --- Script of ``agent_env``: an expert's actions in the share of episodes that are right; the others fail soon.


_EXPERTS = ("expert", "walkthrough", "actions")
_INSTRUCTION = re.compile(r"Instruction:\s*+(?:\[SEP\]\s*+)?+((?:(?!Instruction:|\[SEP\]).)++)(?:\[SEP\]|\n)")
_PRODUCT = re.compile(r"\bB[0-9A-Z]{9}\b")
_LISTED = re.compile(r"AVAILABLE ACTIONS:\s*+(.+?)(?:<\||\Z)", re.DOTALL)
_IDLE = "look"


def act(cue: Cue) -> str:
    turn = len(cue.said)
    page = cue.prompt[max(0, cue.prompt.rfind("<|im_start|>user")) :]  # the environment's last message
    instructions = [found.strip() for found in _INSTRUCTION.findall(page)]
    if cue.is_right():
        expert = _expert(cue)
        if turn < len(expert):
            return _reply(cue, expert[turn], reasoning(cue))
        return _reply(
            cue, _shopping(page, instructions[-1]) if instructions else _any_listed(cue, page), reasoning(cue)
        )
    if not instructions:
        return _reply(cue, _IDLE, "nothing comes to mind. ")
    if turn == 0:
        return _reply(cue, f"search[{instructions[-1]}]", reasoning(cue))
    return "Nothing here is what I am looking for."


def _expert(cue: Cue) -> Sequence[str]:
    for name in _EXPERTS:
        found = cue.task.data.get(name)
        if isinstance(found, list | tuple):
            return [str(action) for action in found]
    return ()


def _shopping(page: str, instruction: str) -> str:
    """The next action of a direct purchase, from the text of the page."""
    shown = page[page.rfind("Instruction:") :]
    if "Buy Now" in shown:
        return "click[Buy Now]"
    product = _PRODUCT.search(shown)
    return f"click[{product.group()}]" if product else f"search[{instruction}]"


def _any_listed(cue: Cue, page: str) -> str:
    listed = _LISTED.findall(page)
    actions = [line.strip(" -,") for line in re.split(r"[\n,]", listed[-1])] if listed else []
    return cue.random(f"action/{len(cue.said)}").choice([action for action in actions if action] or [_IDLE])


def _reply(cue: Cue, action: str, thought: str) -> str:
    """The reply in AgentBench's form; the bare action if the prompt asks for no form."""
    if "ACTION:" in cue.prompt:
        return f"THOUGHT: {thought}ACTION: {action}"
    if "Action:" in cue.prompt:
        return f"Thought:\n{thought}\n\nAction:\n{action}"
    return action


# --- Loads scripts: built-in ones by their workflow, others by import path.


SCRIPTS: dict[str, str] = {
    BuiltInWorkflow.ACTOR_VERIFIER: "services.inference.workflows.scripts:solve_and_verify",
    BuiltInWorkflow.AGENT_ENV: "services.inference.workflows.scripts:act",
    BuiltInWorkflow.CODEGEN_VERIFIER: "services.inference.workflows.scripts:write_and_test",
    BuiltInWorkflow.EXTERNAL_AGENT: "services.inference.workflows.scripts:call_and_answer",
    BuiltInWorkflow.SINGLE_TURN: "services.inference.workflows.scripts:speak",
    BuiltInWorkflow.TOOL_MATH: "services.inference.workflows.scripts:call_and_answer",
    BuiltInWorkflow.TOOL_USE: "services.inference.workflows.scripts:call_and_answer",
    BuiltInWorkflow.VERIFIERS: "services.inference.workflows.scripts:call_and_answer",
}


def load_scripts(config: ForcedEngineConfig, recipe: Recipe) -> ScriptBook:
    """The scripts of a recipe's replay engine; ``ConfigError`` names the remedy if there is none.

    A separate evaluation workflow uses its own built-in script, if there is one; so does a dataset with another workflow.
    """
    training = _part(config.script, recipe.workflow, "workflow")
    evaluation = training
    if (section := recipe.evaluation.workflow) is not None:
        evaluation = _part(None if section.name in SCRIPTS else config.script, section, "evaluation.workflow")
    parts: dict[PlayedBy, Part] = {Purpose.TRAIN: training, Purpose.EVALUATION: evaluation}
    for where, dataset in recipe.data.sections().items():
        if (own := dataset.workflow) is not None:
            purpose = Purpose.TRAIN if is_training(where) else Purpose.EVALUATION
            name = None if own.name in SCRIPTS and own.name != recipe.workflow.name else config.script
            parts[purpose, name_of(where)] = _part(name, own, f"{where}.workflow")
    return ScriptBook(parts=parts, right_share=config.right_share, num_words=_NUM_WORDS, seed=recipe.run.seed)


def _part(name: str | None, workflow: WorkflowConfig, where: str) -> Part:
    path = SCRIPTS.get(name or workflow.name, name or "")
    if ":" not in path:
        raise ConfigError(
            f"inference.<name>.forced.script: there is no script for {name or workflow.name!r} ({where}); write one of "
            f"{', '.join(SCRIPTS)}, or the import path of a function from a rollmill.Cue to text"
        )
    script = load_object(path)
    check_call(script, f"inference.<name>.forced.script: {path}", "def script(cue) -> str", "cue")
    return Part(script=script, settings=workflow_settings(workflow, where))


# --- ``tool_use``, ``tool_math`` and agents over the endpoint: one tool call, where the prompt lists tools, then the
# answer.


_FAILING_SHARE = 0.25


def call_and_answer(cue: Cue) -> str:
    right = cue.is_right()
    final = answer(cue, right=right)  # also of a first turn: a row without a reference is refused at once
    if not cue.said and getattr(cue.settings, "max_turns", 2) > 1 and (call := _call(cue, right)) is not None:
        return f"{reasoning(cue)}<tool_call>{call}</tool_call>"
    tag = getattr(cue.settings, "answer_tag", "")
    return reasoning(cue) + f"<{tag}>{written(cue, value(cue, right=right))}</{tag}>" if tag else final


def _code(cue: Cue, text: str) -> str:
    return "print(1 // 0)" if _fails(cue) else f"print({text})" if text.isdigit() else f"print({text!r})"


def _fails(cue: Cue) -> bool:
    """Never for an agent's own tools: the agent may trust their schema."""
    return hasattr(cue.settings, "tools") and cue.random("failing").random() < _FAILING_SHARE


def _call(cue: Cue, right: bool) -> str | None:
    """The text between the tags; None if the prompt lists no tool. Settings of other workflows name no tools."""
    tools = getattr(cue.settings, "tools", ())
    code = _code(cue, value(cue, right=right)) if "answer" in cue.task.data else "print(1)"
    if getattr(cue.settings, "format", "") == "code":
        return code
    if "python_code_with_standard_io" in tools:
        arguments = {"code": code, "input": ""}
        return json.dumps({"name": "python_code_with_standard_io", "arguments": arguments})
    if "jupyter_code" in tools:
        return json.dumps({"name": "jupyter_code", "arguments": {"code": code}})
    listed = _listed(cue.prompt)
    if not listed:
        return None
    tool = cue.random("tool").choice(listed)
    arguments = {} if _fails(cue) else _arguments(tool.get("parameters", {}))
    return json.dumps({"name": tool["name"], "arguments": arguments})


def _listed(prompt: str) -> list[Mapping[str, Any]]:
    """The functions between ``<tools>`` and ``</tools>``, one JSON object in each line."""
    _, _, rest = prompt.partition("<tools>")
    found: list[Mapping[str, Any]] = []
    for line in rest.partition("</tools>")[0].splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        function = entry.get("function", entry) if isinstance(entry, dict) else None
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            found.append(function)
    return found


def _arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """A value for each argument that the schema requires: the first choice, or a plain value of its type."""
    properties = schema.get("properties", {})
    return {name: _value(properties.get(name, {})) for name in schema.get("required", properties)}


def _value(schema: Mapping[str, Any]) -> Any:
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    kind = schema.get("type", "string")
    if kind == "object":
        return _arguments(schema)
    return {"integer": 1, "number": 1.5, "boolean": True, "array": [], "null": None}.get(str(kind), "text")
