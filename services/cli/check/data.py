"""Looks at the data of a recipe: one row up to the model, overlaps of evaluation and training tasks, reference solutions.

**A row** is played up to the model: the prompt by tokenizer and template, and the reward on two answers. So an error that
only a row shows is found before a process starts: a reward that reads a missing column, or returns no value; prompts longer
than every context. Loads a tokenizer and calls functions of the user, so this is part of `rollmill check` and not of every
start.

**Overlaps**: evaluation tasks that occur in the training data, word for word, or in long runs of words of one training task.
A text is its words in lower case without punctuation. An evaluation task overlaps with a training task when the texts
are equal, or when runs of 13 words (8 for texts of fewer than 13; none below 8) that both have cover half of the
evaluation task's words. Runs of 13 are GPT-3's (Brown et al., arXiv 2005.14165, appendix C: 8 to 13 words by the length
of the texts); half of the words in the same training task is Tülu 3's rule (Lambert et al., arXiv 2411.15124), because
a single run is often a common phrase: 9 of AIME 2024's 30 problems share one with MATH ("where m and n are relatively
prime positive integers. Find m + n."), and none is in the list. For the same reason a run that more than 8 evaluation
tasks have counts as their template. Tasks without a text overlap when their rows are equal and name an ``index``. The runs of
the evaluation tasks are held in memory (at most ``MAX_EVALUATION_WORDS``), training tasks pass by once (at most
``MAX_TRAINING_WORDS``). Texts beyond that are not compared, and the report says so.

**Reference solutions** of programming problems are judged, to find rows with wrong tests: `rollmill check --solutions N`
reports on the first rows of each dataset; `rollmill data code` leaves failing rows out of the file that it writes. Needs a
sandbox on this machine. A run itself does not judge solutions.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from services.cli.check.models import config_of, file_of
from services.common.config.data import TRAIN, DatasetConfig, WorkflowConfig, is_training, name_of
from services.common.config.envgateway import EnvGatewayConfig, SandboxConfig
from services.common.config.recipe import Recipe
from services.common.dataset_rows import BuiltInReward, prompt_in, truth_in
from services.common.errors import ConfigError, DatasetError, InfrastructureError, InvalidRequestError, RollmillError
from services.common.importing import RAISED, load_object, place_of, place_of_error, told
from services.common.records import Purpose, Task
from services.common.system.threads import DaemonThreads
from services.envgateway.calls import CORRECT, RewardOutcome, RewardResult
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import AssertTests, JudgeRequest
from services.envgateway.rewards.pool import MathPool
from services.envgateway.rewards.registry import Rewards, read_tests
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits
from services.orchestrator.tasks.datasets import TaskSource, open_source, why_tests_are_unusable
from services.orchestrator.tasks.math_rows import answer_text
from services.orchestrator.tasks.rows import SkippedRows

if TYPE_CHECKING:
    from services.common.text.chat import Chat
    from services.orchestrator.tasks.datasets import TaskSource

MOST_PROMPTS = 256  # of a dataset that are measured, evenly spaced
_MOST_REWARDED = 5  # rows whose own answer is scored by a reward of the gateway, evenly spaced
_SHOWN_CHARS = 160
FIRST_ROW = "first row"  # begins lines that show it, and are no warnings


@dataclass(frozen=True, slots=True)
class Tried:
    """``problems`` refuse the recipe; ``told`` describes the row."""

    problems: list[str]
    told: list[str]


def try_rows(recipe: Recipe, sources: Mapping[str, TaskSource]) -> Tried:
    """Try the first row of each dataset that is on this machine, and measure the prompts of some more."""
    tried = Tried([], [])
    chat = _chat(recipe, tried)
    for where, source in sources.items():
        if is_training(where) and not recipe.run.steps:
            continue
        workflow = recipe.workflow_of(where)
        try:
            source = _short_prompts(recipe, where, source, tried)
        except DatasetError as error:
            tried.problems.append(error.message)
            continue
        if chat is not None:
            _try_prompts(recipe, where, workflow, source, chat, tried)
        _try_reward(recipe, where, workflow, source, tried)
        if any(service.engine == "forced" for service in recipe.inference.values()):
            _try_script(recipe, where, workflow, source[0], tried)
    return tried


def _short_prompts(recipe: Recipe, where: str, source: TaskSource, tried: Tried) -> TaskSource:
    """The tasks that the run keeps by ``max_prompt_tokens``, where the tokenizers are on this machine; raises
    ``DatasetError`` for none."""
    from services.orchestrator.tasks.prompts import ShortPrompts, open_tokenizer

    limit = recipe.data.sections()[where].max_prompt_tokens
    files = {name: file_of(policy.model.path or "", "tokenizer.json") for name, policy in recipe.policies.items()}
    if limit is None or None in files.values():
        return source
    counters = [open_tokenizer(str(file.parent), f"policies.{name}.model.path") for name, file in files.items() if file]
    field = recipe.workflow_of(where).settings.get("prompt_field")
    short = ShortPrompts(source, limit, counters, field, where)
    if short.num_too_long:
        tried.told.append(f"{where}.max_prompt_tokens ({limit}) leaves out {short.num_too_long} of {len(source)} rows")
    return short


def _chat(recipe: Recipe, tried: Tried) -> Chat | None:
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
            tried.problems.append(
                f"policies.{name}.model.path: the tokenizer of {path} has {len(tokenizer)} tokens, and vocab_size of its config.json "
                f"is {rows}: use the tokenizer that was saved with the model"
            )
        return Chat(tokenizer)
    except RollmillError as error:
        tried.problems.append(f"policies.{name}.model.path: {error.message}")
    except Exception as error:  # a template is a program of the model's author, and can raise anything
        if "jinja2" not in type(error).__module__:
            raise
        tried.problems.append(f"policies.{name}.model.path: the chat template of {path} fails: {error}")
    return None


def _try_prompts(
    recipe: Recipe, where: str, workflow: WorkflowConfig, source: TaskSource, chat: Chat, tried: Tried
) -> None:
    from services.inference.workflows.base import PromptSettings, build_messages
    from services.inference.workflows.registry import workflow_settings
    from services.orchestrator.tasks.datasets import WITH_PROMPT

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
            tried.problems.append(f"{where}: row of task {task.task_id} gives no prompt: {error.message}")
            return
        except Exception as error:  # of the template
            if "jinja2" not in type(error).__module__:
                raise
            tried.problems.append(f"{where}: the chat template refuses task {task.task_id}: {error}")
            return
    key = "model.context_length" if limit == context - 1 else "workflow.settings.max_prompt_tokens"
    _judge_lengths(where, lengths, (limit, key), context, recipe.sampling.max_new_tokens, tried)
    if is_training(where):
        text = chat.decode(chat.prompt_ids(build_messages(settings, source[0])))
        shown = text if len(text) <= _SHOWN_CHARS else f"{text[: _SHOWN_CHARS // 2]} ... {text[-_SHOWN_CHARS // 2 :]}"
        tried.told.append(f"{_first_row(where)} as a prompt of {lengths[0]} tokens: {shown!r}")


def _first_row(where: str) -> str:
    """What the line of a section's first row begins with."""
    return f"{FIRST_ROW} of {source}" if (source := name_of(where)) else FIRST_ROW


def _judge_lengths(
    where: str, lengths: Sequence[int], bound: tuple[int, str], context: int, budget: int, tried: Tried
) -> None:
    """``bound``: the most tokens of a prompt, and the key that says so."""
    limit, key = bound
    too_long = sum(length > limit for length in lengths)
    longest = max(lengths)
    if too_long == len(lengths):
        tried.problems.append(
            f"{where}: every prompt of {len(lengths)} is longer than the {limit} tokens that {key} allows "
            f"(the shortest has {min(lengths)}): write a larger {key.rpartition('.')[2]}, or other rows"
        )
    elif too_long:
        tried.told.append(
            f"{where}: {too_long} of {len(lengths)} prompts are longer than the {limit} tokens that {key} allows "
            f"(the longest has {longest}), and fail each time: write {where}.max_prompt_tokens: {limit}, or a larger "
            f"{key.rpartition('.')[2]}"
        )
    elif longest + budget > context:
        tried.told.append(
            f"{where}: the longest prompt of {len(lengths)} has {longest} tokens, which leaves {context - longest} of "
            f"sampling.max_new_tokens ({budget}) in model.context_length ({context})"
        )


def _spaced(number: int, most: int = MOST_PROMPTS) -> Iterator[int]:
    """Up to ``most`` places, the first one among them."""
    step = max(1, -(-number // most))
    yield from range(0, number, step)


def _try_reward(recipe: Recipe, where: str, workflow: WorkflowConfig, source: TaskSource, tried: Tried) -> None:
    """Call the user's reward with an empty answer and, where the row has an answer, with that one; in a box where the bare
    one gets no more than the empty one."""
    from services.inference.workflows.scripts import boxed

    path, task = workflow.reward, source[0]
    if path in tuple(BuiltInReward) and is_training(where):
        tasks = [source[place] for place in _spaced(len(source), _MOST_REWARDED)]
        _try_built_in(recipe, where, BuiltInReward(path), tasks, tried)
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
            tried.problems.append(f"{where}, task {task.task_id}, {what}: {error.message}")
            return
    gains_nothing = truth is not None and max(values.values()) <= values["an empty answer"]
    if gains_nothing:
        with contextlib.suppress(ConfigError):  # a function that reads no box may raise
            values["the same in a box"] = _reward_of(path, task, boxed(str(truth)))
            gains_nothing = max(values.values()) <= values["an empty answer"]
    if is_training(where):
        shown = ", ".join(f"{value:g} for {what}" for what, value in values.items())
        tried.told.append(f"{_first_row(where)} scored by {path}: {shown}")
        if gains_nothing:
            tried.told.append(
                f"{where}: {path} gives the row's own answer no more than an empty one: call the function with an answer that "
                "should be right"
            )


def _try_built_in(recipe: Recipe, where: str, reward: BuiltInReward, tasks: Sequence[Task], tried: Tried) -> None:
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
            tried.told.append(f"{where}, task {task.task_id}: the reward {reward} could not be tried: {error.message}")
            continue
        asked.append((task, answer))
    try:
        results = asyncio.run(_graded(recipe, reward, asked))
    except RollmillError as error:
        tried.told.append(
            f"{where}, task {asked[0][0].task_id}: the reward {reward} could not be tried: {error.message}"
        )
        return
    for (task, answer), result in zip(asked, results, strict=True):
        if result.reward <= 0:
            tried.told.append(
                f"{where}: {reward} gives the row's own answer no more than an empty one: {answer[:_SHOWN_CHARS]!r} of task "
                f"{task.task_id} is {result.outcome}{result.detail and f' ({result.detail})'}; write the rows' answers as the policy "
                "is to write them, or name another reward"
            )
            return
        if reward is BuiltInReward.BOXED and _SENTENCE.search(answer):
            tried.told.append(
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


def _try_script(recipe: Recipe, where: str, workflow: WorkflowConfig, task: Task, tried: Tried) -> None:
    """Call the script of the replay engine for the first turn of the row, with the messages of the row as its prompt."""
    from services.inference.workflows.base import PromptSettings, build_messages
    from services.inference.workflows.scripts import Scene, load_scripts

    forced = next(service.forced for service in recipe.inference.values() if service.engine == "forced")
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
        tried.problems.append(f"{where}, task {task.task_id}: {raised} (inference.<name>.forced.script)")
    else:
        if is_training(where):
            text = f"{_first_row(where)} answered by the script of the replay engine: {said[:_SHOWN_CHARS]!r}"
            tried.told.append(text)


def _reward_of(path: str, task: Task, answer: str) -> float:
    from services.inference.workflows.base import REWARD_TIMEOUT_S, finite_reward

    function = load_object(path)

    async def call() -> Any:
        async with asyncio.timeout(REWARD_TIMEOUT_S):
            given = await DaemonThreads(1).run(function, task.data, answer)  # one that hangs keeps no command alive
            return await given if inspect.isawaitable(given) else given

    try:
        given = asyncio.run(call())
    except TimeoutError:
        raise ConfigError(
            f"reward {path} took longer than {REWARD_TIMEOUT_S:g} s, and would fail its rollout"
        ) from None
    except RAISED as error:  # the user's code runs here, and can raise anything
        raise ConfigError(
            f"{place_of_error(error)}reward {path} raised {told(error)}; the row has {', '.join(map(str, task.data))}"
        ) from error
    try:
        return finite_reward(given, path, f"task {task.task_id}")
    except ValueError as error:
        raise ConfigError(f"{place_of(function)}{error}") from None


LONG, SHORT = 13, 8
MAX_TEMPLATE = 8
MAX_EVALUATION_WORDS = 1_000_000
MAX_TRAINING_WORDS = 10_000_000
NUM_EXAMPLES = 3

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """One evaluation task and the training task with the largest overlap."""

    task_id: str
    training_task_id: str
    share: float  # of its words; 1 for texts that are equal
    equal: bool
    text: str


@dataclass(slots=True, kw_only=True)
class Overlap:
    """The overlap of one evaluation dataset with the training data."""

    num_tasks: int = 0
    num_unread: int = 0  # evaluation tasks beyond the bound
    matches: list[Match] = field(default_factory=list)  # equal ones first, then by share

    @property
    def num_equal(self) -> int:
        return sum(match.equal for match in self.matches)


@dataclass(slots=True)
class _Text:
    """One text, of one or several evaluation tasks."""

    words: list[int]  # by number in the vocabulary
    run: int  # words in a run; 0 for a text that is too short to have one
    tasks: list[tuple[str, str, str]] = field(default_factory=list)  # dataset, task id, original text
    share: float = 0.0
    training_task_id: str = ""
    equal: bool = False


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


def overlap_lines(recipe: Recipe, sources: Mapping[str, TaskSource]) -> list[str]:
    """A line for each evaluation dataset that overlaps with the training data, and one for those that could not be compared.
    ``sources``: the datasets that are here, by section."""
    missing = [where for where in recipe.data.sections() if where not in sources] if recipe.data.evaluation else []
    unknown = []
    if missing:
        of = "its tasks" if len(missing) == 1 else "their tasks"
        of = "evaluation tasks" if any(map(is_training, missing)) else of
        unknown = [
            f"{', '.join(missing)}: not on this machine yet, so it is not known whether {of} occur in the training data"
        ]
    trained = {where: source for where, source in sources.items() if is_training(where)}
    if not trained or len(trained) == len(sources):
        return unknown
    fields = {where: recipe.workflow_of(where).settings.get("prompt_field") for where in sources}
    texts = {where: _texts(source, fields[where]) for where, source in sources.items()}
    training = chain.from_iterable([texts.pop(where) for where in trained])
    found, num_read = find_overlap(training, texts)
    num_training = sum(map(len, trained.values()))
    unread = f" (the first {num_read} of {num_training} tasks)" if num_read < num_training else ""
    return [*(_line(where, overlap, unread) for where, overlap in found.items() if overlap.matches), *unknown]


def _texts(source: TaskSource, field: object) -> Iterator[tuple[str, str]]:
    for place in range(len(source)):
        yield source[place].task_id, text_of(source[place], field if isinstance(field, str) else None)


def _line(where: str, overlap: Overlap, unread: str) -> str:
    count, total = len(overlap.matches), overlap.num_tasks - overlap.num_unread
    near = count - overlap.num_equal
    kinds = [f"{overlap.num_equal} word for word"] if overlap.num_equal else []
    kinds += [f"{near} with at least half of their words in runs of {LONG} of one training task"] if near else []
    shown = []
    for match in overlap.matches[:NUM_EXAMPLES]:
        text, share = " ".join(match.text.split()), "" if match.equal else f"{match.share:.0%} of "
        text = text if len(text) <= 80 else f"{text[:79]}…"
        shown.append(f'{match.task_id} is {share}training task {match.training_task_id}: "{text}"')
    beyond = f"; {overlap.num_unread} more tasks were not looked at" if overlap.num_unread else ""
    return (
        f"{where}: {count} of {total} tasks ({count / total:.1%}) overlap with {TRAIN}{unread}: {' and '.join(kinds)}; "
        f"{'; '.join(shown)}{beyond}"
    )


def find_overlap(
    training: Iterable[tuple[str, str]],
    evaluation: Mapping[str, Iterable[tuple[str, str]]],
    max_training_words: int = MAX_TRAINING_WORDS,
    max_evaluation_words: int = MAX_EVALUATION_WORDS,
) -> tuple[dict[str, Overlap], int]:
    """The overlap of each evaluation dataset with the training data, and the number of training tasks that were
    compared.

    Tasks are (id, text); those without words are never in common.
    """
    found = {name: Overlap() for name in evaluation}
    by_words: dict[str, _Text] = {}
    by_run: dict[int, list[_Text]] = {}  # by hash; of a template one more than the most
    vocabulary: dict[str, int] = {}  # from 1; 0 is a word of no evaluation task
    for name, tasks in evaluation.items():
        for task_id, text in tasks:
            words = words_of(text)
            found[name].num_tasks += 1
            max_evaluation_words -= len(words)
            if max_evaluation_words < 0:
                found[name].num_unread += 1
                continue
            joined = " ".join(words)
            if words and joined not in by_words:
                numbers = [vocabulary.setdefault(word, len(vocabulary) + 1) for word in words]
                one = by_words[joined] = _Text(numbers, next((n for n in (LONG, SHORT) if len(words) >= n), 0))
                for key in {key for key, _ in _runs(numbers, one.run)}:
                    if len(having := by_run.setdefault(key, [])) <= MAX_TEMPLATE:
                        having.append(one)
            if words:
                by_words[joined].tasks.append((name, task_id, text))
    num_read = 0
    for task_id, text in training:
        words = words_of(text)
        max_training_words -= len(words)
        if max_training_words < 0:
            break
        num_read += 1
        same = by_words.get(" ".join(words))
        if same is not None and not same.equal:
            same.equal, same.share, same.training_task_id = True, 1.0, task_id
        in_common: defaultdict[int, set[int]] = defaultdict(set)  # id of a text -> hashes of runs
        near: dict[int, _Text] = {}
        for known_words in _known_parts([vocabulary.get(word, 0) for word in words]):
            for key in (key for run in (LONG, SHORT) for key, _ in _runs(known_words, run)):
                for one in having if len(having := by_run.get(key, [])) <= MAX_TEMPLATE else ():
                    near[id(one)] = one
                    in_common[id(one)].add(key)
        for which, one in near.items():
            if not one.equal and (share := _covered(one, in_common[which])) > one.share:
                one.share, one.training_task_id = share, task_id
    for one in by_words.values():
        for name, task_id, text in one.tasks if one.equal or one.share >= 0.5 else ():
            found[name].matches.append(
                Match(
                    task_id=task_id, training_task_id=one.training_task_id, share=one.share, equal=one.equal, text=text
                )
            )
    for overlap in found.values():
        overlap.matches.sort(key=lambda match: (not match.equal, -match.share))
    return found, num_read


def _runs(numbers: Sequence[int], run: int) -> Iterator[tuple[int, int]]:
    """(hash, start) of every sequence of so many words."""
    if run:
        for begin in range(len(numbers) - run + 1):
            yield hash(tuple(numbers[begin : begin + run])), begin


def _known_parts(numbers: Sequence[int]) -> Iterator[Sequence[int]]:
    """The longest stretches without a 0 in which a run has room: no other run is one of an evaluation task."""
    begin = 0
    for end in [place for place, number in enumerate(numbers) if not number] + [len(numbers)]:
        if end - begin >= SHORT:
            yield numbers[begin:end]
        begin = end + 1


def _covered(text: _Text, keys: set[int]) -> float:
    """Share of a text's words that stand in one of these runs."""
    count = end = 0
    for key, begin in _runs(text.words, text.run):
        if key in keys:
            count += begin + text.run - max(end, begin)
            end = begin + text.run
    return count / len(text.words)


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
    keep: Callable[[Mapping[str, Any]], None] = lambda row: None,
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
    sources: Mapping[str, TaskSource], sandbox: SandboxConfig, case_time_s: float | None, most: int
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


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """The numbers of rows that `rollmill data code` has written and left out."""

    num_rows: int
    left_out: Mapping[str, SkippedRows]  # by input: rows that cannot be used
    solutions: Mapping[str, SolutionReport]  # by input


def prepare_code(
    inputs: Sequence[str], output: Path, sandbox: SandboxConfig, case_time_s: float | None
) -> PreparedRows:
    """Write the usable rows of all inputs in one form; the file appears under its name only when complete.

    Raises:
        DatasetError: an input cannot be read, or has no usable row.
    """
    import orjson

    def required(row: Mapping[str, Any], where: str) -> None:
        if why := why_tests_are_unusable(row["tests"]):
            raise DatasetError(f"{where}: {why}")

    left_out: dict[str, SkippedRows] = {}
    reports: dict[str, SolutionReport] = {}
    written = 0
    partial = output.with_name(f"{output.name}.partial")
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with partial.open("wb") as file:

            def keep(row: Mapping[str, Any]) -> None:
                nonlocal written
                file.write(orjson.dumps(row) + b"\n")
                written += 1

            for name in inputs:
                source = open_source(DatasetConfig(path=name, form="code"), seed=0, required=required)
                left_out[name] = source.left_out
                tasks = (source[place] for place in range(len(source)))
                rows = ((f"row {task.task_id}", task.data) for task in tasks)
                reports[name] = asyncio.run(judge_solutions(rows, sandbox, case_time_s, keep))
        os.replace(partial, output)
    finally:
        partial.unlink(missing_ok=True)
    return PreparedRows(written, left_out, reports)
