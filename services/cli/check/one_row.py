"""Plays one row of the training data up to the model: the prompt by tokenizer and template, and the reward on two answers.

So an error that only a row shows is found before a process starts: a reward that reads a missing column, or returns no
value; prompts longer than every context. Loads a tokenizer and calls functions of the user, so this is part of `rollmill
check` and not of every start.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from services.cli.check.model_files import config_of, file_of
from services.cli.check.solutions import judge_solutions
from services.common.config.data import WorkflowConfig, is_training, name_of
from services.common.config.processes.envgateway import EnvGatewayConfig
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError, DatasetError, RollmillError
from services.common.importing import load_object
from services.common.records.dataset_rows import BuiltInReward, truth_in
from services.common.records.types import Purpose, Task
from services.common.system.threads import DaemonThreads
from services.common.user_code import RAISED, place_of, place_of_error, told
from services.envgateway.rewards.math.pool import MathPool
from services.envgateway.rewards.math.worker import REASONING_GYM
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rewards.result import CORRECT, RewardOutcome, RewardResult
from services.orchestrator.tasks.rows.math import answer_text

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
    from services.orchestrator.tasks.prompt_length import ShortPrompts, open_tokenizer

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
    from services.common.text.chat import Chat
    from services.common.text.huggingface import load_tokenizer

    try:
        tokenizer = load_tokenizer(path)
        _check_vocabulary(f"policies.{name}.model.path", path, tokenizer, tried)
        return Chat(tokenizer)
    except RollmillError as error:
        tried.problems.append(f"policies.{name}.model.path: {error.message}")
    except Exception as error:  # a template is a program of the model's author, and can raise anything
        if "jinja2" not in type(error).__module__:
            raise
        tried.problems.append(f"policies.{name}.model.path: the chat template of {path} fails: {error}")
    return None


def _check_vocabulary(where: str, path: str, tokenizer: Any, tried: Tried) -> None:
    rows = config_of(path).get("vocab_size")
    if isinstance(rows, int) and len(tokenizer) > rows:
        tried.problems.append(
            f"{where}: the tokenizer of {path} has {len(tokenizer)} tokens, and vocab_size of its config.json is {rows}: use the "
            "tokenizer that was saved with the model"
        )


def _try_prompts(
    recipe: Recipe, where: str, workflow: WorkflowConfig, source: TaskSource, chat: Chat, tried: Tried
) -> None:
    from services.inference.workflows.prompts import PromptSettings, build_messages
    from services.inference.workflows.registry import workflow_settings
    from services.orchestrator.tasks.requirements import WITH_PROMPT

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
    from services.inference.scripts.answers import boxed

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
    from services.inference.scripts.answers import boxed

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
    pool = MathPool(gateway.math) if is_math else MathPool(gateway.reasoning_gym, REASONING_GYM)
    try:
        rewards = Rewards(pool, reasoning_pool=pool)
        return [await rewards.compute(reward, task.data, answer) for task, answer in asked]
    finally:
        await pool.close()


def _try_script(recipe: Recipe, where: str, workflow: WorkflowConfig, task: Task, tried: Tried) -> None:
    """Call the script of the replay engine for the first turn of the row, with the messages of the row as its prompt."""
    from services.inference.scripts.base import Scene
    from services.inference.scripts.registry import load_scripts
    from services.inference.workflows.prompts import PromptSettings, build_messages

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
    from services.inference.workflows.rewards import REWARD_TIMEOUT_S, finite_reward

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
