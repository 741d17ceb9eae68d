"""Looks at the data of a recipe: one row up to the model, overlaps of evaluation and training tasks, reference solutions.

**A row** is played up to the model: the prompt by tokenizer and template, and the reward on two answers. So an error that
only a row shows is found before a process starts: a reward that reads a missing column, or returns no value; prompts longer
than every context. Loads a tokenizer and calls functions of the user, so this is part of `rollmill check` and not of every
start.

**Overlaps**: evaluation tasks that occur in the training data, word for word, or in long runs of words of one training task.
A text is its words in lower case without punctuation. An evaluation task overlaps with a training task when the texts
are equal, or when the training task has half of its runs of 13 words. Runs of 13 are GPT-3's (Brown et al., arXiv 2005.14165,
appendix C); half of them in the same training task is near Tülu 3's rule (Lambert et al., arXiv 2411.15124), because
a single run is often a common phrase: 9 of AIME 2024's 30 problems share one with MATH ("where m and n are relatively
prime positive integers. Find m + n."), and none is in the list. For the same reason a run that more than 8 evaluation
tasks have counts as their template. Tasks without a text overlap when their rows are equal and name an ``index``.

**Reference solutions** of programming problems are judged, to find rows with wrong tests: `rollmill check --solutions N`
reports on the first rows of each dataset; `rollmill data code` leaves failing rows out of the file that it writes. Needs a
sandbox on this machine. A run itself does not judge solutions.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from services.common.config.data import TRAIN, is_training, name_of
from services.common.config.envgateway import EnvGatewayConfig, SandboxConfig
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInReward, prompt_in, truth_in
from services.common.errors import (
    ConfigError,
    DatasetError,
    DeadlineError,
    InfrastructureError,
    InvalidRequestError,
    RollmillError,
)
from services.common.importing import RAISED, load_object, place_of, place_of_error, told
from services.common.records import Purpose, Task
from services.common.safetensors_files import config_of, file_of
from services.envgateway.calls import CORRECT, RewardOutcome, RewardResult
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, JudgeRequest
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import Rewards, read_tests
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from services.orchestrator.tasks.math_rows import answer_text
from services.orchestrator.tasks.rows import SkippedRows, UsableRows

if TYPE_CHECKING:
    from services.common.text.chat import Chat

MOST_PROMPTS = 256  # of a dataset that are measured, evenly spaced
_MOST_REWARDED = 5  # rows whose own answer is scored by a reward of the gateway, evenly spaced
_SHOWN_CHARS = 160
FIRST_ROW = "first row"  # begins lines that show it, and are no warnings


@dataclass(frozen=True, slots=True)
class Tried:
    """``problems`` refuse the recipe; ``told`` describes the row."""

    problems: list[str]
    told: list[str]


def try_rows(recipe: Recipe, sources: Mapping[str, UsableRows]) -> Tried:
    """Try the first row of each dataset that is on this machine, and measure the prompts of some more."""
    tried, chat = Tried([], []), None
    try:
        chat = _chat(recipe)
    except ConfigError as error:
        tried.problems.append(error.message)
    for where, source in sources.items():
        if is_training(where) and not recipe.run.steps:
            continue
        try:
            source = _short_prompts(recipe, where, source, tried)
        except DatasetError as error:
            tried.problems.append(error.message)
            continue
        trials = [_try_reward(recipe, where, source), _try_script(recipe, where, source[0])]
        for trial in trials if chat is None else [_try_prompts(recipe, where, source, chat), *trials]:
            try:
                tried.told.extend(trial)
            except ConfigError as error:
                tried.problems.append(error.message)
    return tried


def _short_prompts(recipe: Recipe, where: str, source: UsableRows, tried: Tried) -> UsableRows:
    """The tasks that the run keeps by ``max_prompt_tokens``, where the tokenizers are on this machine; raises
    ``DatasetError`` for none."""
    from services.orchestrator.tasks.prompts import short_prompts

    if any(file_of(policy.model.path or "", "tokenizer.json") is None for policy in recipe.policies.values()):
        return source
    short = short_prompts({where: source}, recipe, Path())[where]
    if too_long := short.num_too_long:
        limit = recipe.data.sections()[where].max_prompt_tokens
        tried.told.append(f"{where}.max_prompt_tokens ({limit}) leaves out {too_long} of {len(source)} rows")
    return short


def _chat(recipe: Recipe) -> Chat | None:
    """The tokenizer of the policy that plays, with its template; None if the run makes the tokenizer, or this machine lacks its files."""
    name = recipe.workflow.settings.get("policy") or next(iter(recipe.playing_policies), None)
    path = recipe.policies[name].model.path if name in recipe.policies else None
    engines = {service.engine for service in recipe.inference.values()}
    if path is None or engines == {"scripted"}:
        return None
    if file_of(path, "tokenizer.json") is None and file_of(path, "tokenizer.model") is None:
        return None
    from services.common.text.chat import Chat, load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        rows = config_of(path).get("vocab_size")
        if isinstance(rows, int) and len(tokenizer) > rows:
            raise ConfigError(
                f"the tokenizer of {path} has {len(tokenizer)} tokens, and vocab_size of its config.json is {rows}: use the "
                "tokenizer that was saved with the model"
            )
        return Chat(tokenizer)
    except RollmillError as error:
        raise ConfigError(f"policies.{name}.model.path: {error.message}") from None
    except Exception as error:  # a template is a program of the model's author, and can raise anything
        if "jinja2" not in type(error).__module__:
            raise
        raise ConfigError(f"policies.{name}.model.path: the chat template of {path} fails: {error}") from None


def _try_prompts(recipe: Recipe, where: str, source: UsableRows, chat: Chat) -> Iterator[str]:
    from services.inference.workflows.base import PromptSettings, build_messages
    from services.inference.workflows.registry import workflow_settings
    from services.orchestrator.tasks.datasets import WITH_PROMPT

    workflow = recipe.workflow_of(where)
    settings = workflow_settings(workflow)
    if workflow.name not in WITH_PROMPT or not isinstance(settings, PromptSettings):
        return  # prompts of its own, or of an environment
    policy = recipe.policies[settings.policy or next(iter(recipe.playing_policies))]
    chat = chat.with_thinking(settings.thinking)
    context = policy.model.context_length
    limit = min(context - 1, settings.max_prompt_tokens or context)
    lengths: list[int] = []
    for place in _spaced(len(source)):
        task = source[place]
        try:
            lengths.append(len(chat.prompt_ids(build_messages(settings, task))))
        except RollmillError as error:
            raise ConfigError(f"{where}: row of task {task.task_id} gives no prompt: {error.message}") from None
        except Exception as error:  # of the template
            if "jinja2" not in type(error).__module__:
                raise
            raise ConfigError(f"{where}: the chat template refuses task {task.task_id}: {error}") from None
    key = "model.context_length" if limit == context - 1 else "workflow.settings.max_prompt_tokens"
    yield from _judge_lengths(where, lengths, (limit, key), context, recipe.sampling.max_new_tokens)
    if is_training(where):
        text = chat.decode(chat.prompt_ids(build_messages(settings, source[0])))
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]} ... {text[-_SHOWN_CHARS // 2 :]}"
        yield f"{_first_row(where)} as a prompt of {lengths[0]} tokens: {shown!r}"


def _first_row(where: str) -> str:
    """What the line of a section's first row begins with."""
    return f"{FIRST_ROW} of {source}" if (source := name_of(where)) else FIRST_ROW


def _judge_lengths(
    where: str, lengths: Sequence[int], bound: tuple[int, str], context: int, budget: int
) -> Iterator[str]:
    """``bound``: the most tokens of a prompt, and the key that says so."""
    limit, key = bound
    too_long = sum(length > limit for length in lengths)
    longest = max(lengths)
    if too_long == len(lengths):
        raise ConfigError(
            f"{where}: every prompt of {len(lengths)} is longer than the {limit} tokens that {key} allows "
            f"(the shortest has {min(lengths)}): write a larger {key.rpartition('.')[2]}, or other rows"
        )
    if too_long:
        yield (
            f"{where}: {too_long} of {len(lengths)} prompts are longer than the {limit} tokens that {key} allows "
            f"(the longest has {longest}), and fail each time: write {where}.max_prompt_tokens: {limit}, or a larger "
            f"{key.rpartition('.')[2]}"
        )
    elif longest + budget > context:
        yield (
            f"{where}: the longest prompt of {len(lengths)} has {longest} tokens, which leaves {context - longest} of "
            f"sampling.max_new_tokens ({budget}) in model.context_length ({context})"
        )


def _spaced(number: int, most: int = MOST_PROMPTS) -> Iterator[int]:
    """Up to ``most`` places, the first one among them."""
    step = max(1, -(-number // most))
    yield from range(0, number, step)


def _try_reward(recipe: Recipe, where: str, source: UsableRows) -> Iterator[str]:
    """Call the user's reward with an empty answer and, where the row has an answer, with that one; in a box where the bare
    one gets no more than the empty one."""
    from services.inference.workflows.scripts import boxed

    path, task = recipe.workflow_of(where).reward, source[0]
    if path in tuple(BuiltInReward) and is_training(where):
        tasks = [source[place] for place in _spaced(len(source), _MOST_REWARDED)]
        yield from _try_built_in(recipe, where, BuiltInReward(path), tasks)
    if not isinstance(path, str) or ":" not in path:
        return
    truth = truth_in(task.data)
    answers = {"an empty answer": ""}
    if truth is not None:
        answers["the row's own answer"] = str(truth)
    values: dict[str, float] = {}
    for what, answer in answers.items():
        try:
            values[what] = _reward_of(path, task, answer)
        except ConfigError as error:
            raise ConfigError(f"{where}, task {task.task_id}, {what}: {error.message}") from None
    gains_nothing = truth is not None and max(values.values()) <= values["an empty answer"]
    if gains_nothing:
        with contextlib.suppress(ConfigError):  # a function that reads no box may raise
            values["the same in a box"] = _reward_of(path, task, boxed(str(truth)))
            gains_nothing = max(values.values()) <= values["an empty answer"]
    if is_training(where):
        shown = ", ".join(f"{value:g} for {what}" for what, value in values.items())
        yield f"{_first_row(where)} scored by {path}: {shown}"
        if gains_nothing:
            yield (
                f"{where}: {path} gives the row's own answer no more than an empty one: call the function with an answer that "
                "should be right"
            )


def _try_built_in(recipe: Recipe, where: str, reward: BuiltInReward, tasks: Sequence[Task]) -> Iterator[str]:
    """Score the own answers of some rows, written as a policy writes them, with a reward of the gateway."""
    from services.inference.workflows.scripts import boxed

    asked: list[tuple[Task, str]] = []
    for task in tasks:
        truth = task.data.get("solution") if reward is BuiltInReward.CODE else truth_in(task.data)
        if truth is None:
            continue
        answer = str(truth)
        try:
            if reward in (BuiltInReward.BOXED, BuiltInReward.MATH):
                # A number alone: behind GSM8K's mark, without a box, dollar signs or a fraction of zeros.
                answer = boxed(re.sub(r"(?<=\d)\.0+\Z", "", answer_text(truth, "the row").strip("$ ")))
        except DatasetError as error:
            yield f"{where}, task {task.task_id}: the reward {reward} could not be tried: {error.message}"
            continue
        asked.append((task, answer))
    try:
        results = asyncio.run(_graded(recipe, reward, asked))
    except RollmillError as error:
        yield f"{where}, task {asked[0][0].task_id}: the reward {reward} could not be tried: {error.message}"
        return
    for (task, answer), result in zip(asked, results, strict=True):
        if result.reward <= 0:
            yield (
                f"{where}: {reward} gives the row's own answer no more than an empty one: {answer[:_SHOWN_CHARS]!r} of task "
                f"{task.task_id} is {result.outcome}{result.detail and f' ({result.detail})'}; write the rows' answers as the policy "
                "is to write them, or name another reward"
            )
            return
        if reward is BuiltInReward.BOXED and _SENTENCE.search(answer):
            yield (
                f"{where}: {reward} compares texts, and the answer of task {task.task_id} is a text of several words or lines: "
                f"{answer[:_SHOWN_CHARS]!r}; write the value alone, or name another reward"
            )
            return


_SENTENCE = re.compile(r"\n|(?<![^\W\d_])[^\W\d_]{2,}+\s++[^\W\d_]{2,}+\s++\S")


async def _graded(recipe: Recipe, reward: BuiltInReward, asked: Sequence[tuple[Task, str]]) -> list[RewardResult]:
    gateway = recipe.envgateway or EnvGatewayConfig()
    if reward is BuiltInReward.CODE:
        results = []
        for task, answer in asked:
            row = (f"task {task.task_id}", {**task.data, "solution": answer})
            report = await judge_solutions(iter([row]), gateway.sandbox, gateway.code.case_time_s)
            failed = RewardResult(outcome=RewardOutcome.WRONG, detail=str(report.failed))
            results.append(failed if report.failed.count else CORRECT)
        return results
    is_math = reward is not BuiltInReward.REASONING_GYM
    pool = MathPool(gateway.math) if is_math else MathPool(gateway.reasoning_gym, BuiltInReward.REASONING_GYM)
    try:
        rewards = Rewards(pool, reasoning_pool=pool)
        return [await rewards.compute(reward, task.data, answer) for task, answer in asked]
    finally:
        await pool.close()


def _try_script(recipe: Recipe, where: str, task: Task) -> Iterator[str]:
    """Call the script of the replay engine for the first turn of the row, with the messages of the row as its prompt."""
    from services.inference.workflows.base import PromptSettings, build_messages
    from services.inference.workflows.scripts import Scene, load_scripts

    forced = next((service.forced for service in recipe.inference.values() if service.engine == "forced"), None)
    if forced is None:
        return
    workflow = recipe.workflow_of(where)
    scene = Scene(task, Purpose.TRAIN if is_training(where) else Purpose.EVALUATION, 0, name_of(where))
    policy = workflow.settings.get("policy") or next(iter(recipe.playing_policies))
    try:
        given = build_messages(PromptSettings(prompt_field=workflow.settings.get("prompt_field")), task)
    except DatasetError:
        return  # an environment, whose first prompt is not in the row
    prompt = "\n".join(str(message.get("content")) for message in given)
    try:
        said = scene.text(load_scripts(forced, recipe), policy, prompt)
    except RAISED as error:  # the user's script
        raised = f"{place_of_error(error)}the script of the replay engine raised {told(error)}"
        raise ConfigError(f"{where}, task {task.task_id}: {raised} (inference.<name>.forced.script)") from None
    if is_training(where):
        yield f"{_first_row(where)} answered by the script of the replay engine: {said[:_SHOWN_CHARS]!r}"


def _reward_of(path: str, task: Task, answer: str) -> float:
    from services.inference.workflows.base import call_reward, finite_reward

    function = load_object(path)
    try:
        given = asyncio.run(call_reward(function, path, task, answer))
    except DeadlineError as error:
        raise ConfigError(f"{error.message}, and would fail its rollout") from None
    except RAISED as error:  # the user's code runs here, and can raise anything
        raise ConfigError(
            f"{place_of_error(error)}reward {path} raised {told(error)}; the row has {', '.join(map(str, task.data))}"
        ) from error
    try:
        return finite_reward(given, path, f"task {task.task_id}")
    except ValueError as error:
        raise ConfigError(f"{place_of(function)}{error}") from None


RUN = 13  # words
MAX_TEMPLATE = 8
MOST_EVALUATION, MOST_TRAINING = 20_000, 200_000  # tasks of one dataset that are compared
NUM_EXAMPLES = 3

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


@dataclass(slots=True)
class Seen:
    """One evaluation task, and the training task with the largest overlap."""

    task_id: str
    text: str
    num_runs: int
    share: float = 0.0  # of its runs; 1 for texts that are equal
    training_task_id: str = ""


def words_of(text: str) -> list[str]:
    """
    >>> words_of("Find $m+n$, where m≠n.")
    ['find', 'm', 'n', 'where', 'm', 'n']
    """
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


def text_of(task: Task, field: str | None = None) -> str:
    """The text of a task: the prompt, or the whole row if there is no prompt but an index; empty without both.

    ``field``: the prompt's column; left out, those that the workflows look for.
    """
    try:
        prompt = prompt_in(task.data, field, "row")
    except DatasetError:
        return orjson.dumps(task.data, option=orjson.OPT_SORT_KEYS).decode() if "index" in task.data else ""
    if isinstance(prompt, str):
        return prompt
    said = [m.get("content") for m in prompt if m.get("role") == "user"]
    return "\n".join(text for text in said if isinstance(text, str))


def overlap_lines(recipe: Recipe, sources: Mapping[str, UsableRows]) -> list[str]:
    """A line for each evaluation dataset that overlaps with the training data, and one for those that could not be compared.
    ``sources``: the datasets that are here, by section."""
    lines = []
    if missing := [where for where in recipe.data.sections() if where not in sources] if recipe.data.evaluation else []:
        of = "its tasks" if len(missing) == 1 else "their tasks"
        of = "evaluation tasks" if any(map(is_training, missing)) else of
        lines = [
            f"{', '.join(missing)}: not on this machine yet, so it is not known whether {of} occur in the training data"
        ]
    training = [where for where in sources if is_training(where)]
    evaluation = [where for where in sources if not is_training(where)]
    if not training or not evaluation:
        return lines

    def texts(where: str, most: int) -> Iterator[tuple[str, str]]:
        field, source = recipe.workflow_of(where).settings.get("prompt_field"), sources[where]
        for place in range(min(most, len(source))):
            yield source[place].task_id, text_of(source[place], field if isinstance(field, str) else None)

    trained = chain.from_iterable(texts(where, MOST_TRAINING) for where in training)
    found = find_overlap(trained, {where: texts(where, MOST_EVALUATION) for where in evaluation})
    unread = any(len(sources[where]) > MOST_TRAINING for where in training)
    told = [_line(where, len(sources[where]), seen, unread) for where, seen in found.items() if seen]
    return [*told, *lines]


def _line(where: str, total: int, found: Sequence[Seen], unread: bool) -> str:
    equal, read = sum(seen.share == 1 for seen in found), min(total, MOST_EVALUATION)
    kinds = [f"{equal} word for word"] if equal else []
    kinds += [f"{len(found) - equal} with at least half of their runs of {RUN} words"] if equal < len(found) else []
    shown = []
    for seen in found[:NUM_EXAMPLES]:
        text, share = " ".join(seen.text.split()), "" if seen.share == 1 else f"{seen.share:.0%} of "
        text = text if len(text) <= 80 else f"{text[:79]}…"
        shown.append(f'{seen.task_id} is {share}training task {seen.training_task_id}: "{text}"')
    with_what = f"{TRAIN}{f' (the first {MOST_TRAINING} tasks of each dataset)' if unread else ''}"
    beyond = f"; {total - read} more tasks were not looked at" if total > read else ""
    return (
        f"{where}: {len(found)} of {read} tasks ({len(found) / read:.1%}) overlap with {with_what}: {' and '.join(kinds)}; "
        f"{'; '.join(shown)}{beyond}"
    )


def find_overlap(
    training: Iterable[tuple[str, str]], evaluation: Mapping[str, Iterable[tuple[str, str]]]
) -> dict[str, list[Seen]]:
    """The tasks of each evaluation dataset that overlap with a training task, equal ones first, then by share. Tasks are (id,
    text); those without words are never in common."""
    found: dict[str, list[Seen]] = {name: [] for name in evaluation}
    by_run: defaultdict[int, list[Seen]] = defaultdict(list)  # by hash; also of whole texts
    for name, tasks in evaluation.items():
        for task_id, text in tasks:
            whole, runs = _hashes(text)
            found[name].append(seen := Seen(task_id, text, max(1, len(runs))))
            for key in runs | whole:
                by_run[key].append(seen)
    for task_id, text in training:
        whole, runs = _hashes(text)
        common: Counter[int] = Counter()
        near = {}
        for key in runs | whole:
            having = by_run.get(key, ())
            for seen in having if key in whole or len(having) <= MAX_TEMPLATE else ():
                near[id(seen)] = seen
                common[id(seen)] += seen.num_runs if key in whole else 1
        for which, seen in near.items():
            if (share := min(1.0, common[which] / seen.num_runs)) > seen.share:
                seen.share, seen.training_task_id = share, task_id
    return {
        name: sorted((seen for seen in tasks if seen.share >= 0.5), key=lambda seen: -seen.share)
        for name, tasks in found.items()
    }


def _hashes(text: str) -> tuple[set[int], set[int]]:
    """Hashes of the whole text, and of its runs of words; both empty for a text without words."""
    words = words_of(text)
    runs = {hash(tuple(words[at : at + RUN])) for at in range(len(words) - RUN + 1)}
    return {hash((len(words), *words))} if words else set(), runs


QUEUE_TIMEOUT_S = 600.0
_ATTEMPTS = 2  # of a solution that a busy machine may have made too slow


@dataclass(slots=True)
class SolutionReport:
    """The results of the reference solutions of a dataset."""

    num_passed: int = 0
    num_without: int = 0  # rows that have none
    failed: SkippedRows = field(default_factory=SkippedRows)

    def __str__(self) -> str:
        text = f"{self.num_passed} reference solutions pass their tests"
        if self.num_without:
            text += f", {self.num_without} rows have none"
        return f"{text}, {self.failed.count} fail: {self.failed}" if self.failed.count else text


async def judge_solutions(
    rows: Iterator[tuple[str, Mapping[str, Any]]],
    sandbox: SandboxConfig,
    case_time_s: float | None = None,
    keep: Callable[[Mapping[str, Any]], object] = lambda row: None,
) -> SolutionReport:
    """Judge the solution of each row, which is named by its text; ``keep`` is called, in order, with rows to be kept.

    Raises:
        SandboxRefusedError: no program can be run here.
        InfrastructureError: the machinery failed; the named row remains unchecked.
    """
    pool = SandboxPool.start_before_threads(sandbox)
    report = SolutionReport()
    judge, waiting = Judge(pool), list[tuple[str, Mapping[str, Any], asyncio.Task[str | None]]]()

    async def take() -> None:
        where, row, task = waiting.pop(0)
        fault = await task
        if fault:
            report.failed.add(f"{where}: its reference solution does not pass its tests: {fault}")
            return
        report.num_passed += fault is not None
        report.num_without += fault is None
        keep(row)

    try:
        for where, row in rows:
            waiting.append((where, row, asyncio.create_task(_fault(judge, row, case_time_s))))
            if len(waiting) >= 2 * sandbox.num_slots:
                await take()
        while waiting:
            await take()
    finally:
        await pool.close()
    return report


async def _fault(judge: Judge, row: Mapping[str, Any], case_time_s: float | None) -> str | None:
    """Why the solution does not pass; empty if the solution passes, None for a row without one."""
    solution = row.get("solution")
    if not isinstance(solution, str) or not solution.strip():
        return None
    try:
        tests = read_tests(row)
    except InvalidRequestError as error:
        return error.message
    # As it is: a solution that was completed with its prompt has been so when the row was read.
    request = JudgeRequest(code=solution, tests=tests, limits=ExecutionLimits(wall_s=case_time_s), stop_early=True)
    told = ""
    for _ in range(_ATTEMPTS):
        result = await judge.judge(request, wait_s=QUEUE_TIMEOUT_S)
        if result.verdict is RunStatus.OK:
            return ""
        told = f"{result.verdict.value}, {result.detail}"
        if result.verdict in (RunStatus.INFRA_ERROR, RunStatus.CANCELLED):
            raise InfrastructureError(f"a reference solution could not be judged: {told}")
        if isinstance(tests, AssertTests) and result.verdict is RunStatus.INVALID_TESTS:
            break
    return told


def solution_lines(
    sources: Mapping[str, UsableRows], sandbox: SandboxConfig, case_time_s: float | None, most: int
) -> list[str]:
    """One line for each dataset that has tests: the results of the reference solutions of its first ``most`` rows."""
    lines = []
    for where, source in sources.items():
        tasks = [source[place] for place in range(min(most, len(source)))]
        rows = [(f"row {task.task_id}", task.data) for task in tasks if isinstance(task.data.get("tests"), Mapping)]
        if rows:
            lines.append(
                f"{where}: of {len(rows)} rows, {asyncio.run(judge_solutions(iter(rows), sandbox, case_time_s))}"
            )
    return lines
