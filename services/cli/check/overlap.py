"""Finds evaluation tasks that occur in the training data: word for word, or in long runs of words of one training task.

A text is its words in lower case without punctuation. An evaluation task overlaps with a training task when the texts
are equal, or when runs of 13 words (8 for texts of fewer than 13; none below 8) that both have cover half of the
evaluation task's words. Runs of 13 are GPT-3's (Brown et al., arXiv 2005.14165, appendix C: 8 to 13 words by the length
of the texts); half of the words in the same training task is Tülu 3's rule (Lambert et al., arXiv 2411.15124), because
a single run is often a common phrase: 9 of AIME 2024's 30 problems share one with MATH ("where m and n are relatively
prime positive integers. Find m + n."), and none is in the list. For the same reason a run that more than 8 evaluation
tasks have counts as their template. Tasks without a text overlap when their rows are equal and name an ``index``.

The runs of the evaluation tasks are held in memory (at most ``MAX_EVALUATION_WORDS``), training tasks pass by once (at
most ``MAX_TRAINING_WORDS``). Texts beyond that are not compared, and the report says so.
"""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import orjson

from services.common.config.data import TRAIN, is_training
from services.common.config.recipe import Recipe
from services.common.errors import DatasetError
from services.common.records.dataset_rows import prompt_in
from services.common.records.types import Task
from services.orchestrator.tasks.datasets import TaskSource

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
    tasks: list[tuple[str, str, str]]  # dataset, task id, original text
    share: float = 0.0
    equal: bool = False
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


def overlap_lines(recipe: Recipe, sources: Mapping[str, TaskSource]) -> list[str]:
    """A line for each evaluation dataset that overlaps with the training data, and one for those that could not be compared.
    ``sources``: the datasets that are here, by section."""
    missing = [where for where in recipe.data.sections() if where not in sources] if recipe.data.evaluation else []
    unknown = [_unknown(missing)] if missing else []
    trained = {where: source for where, source in sources.items() if is_training(where)}
    if not trained or len(trained) == len(sources):
        return unknown
    texts = {where: _texts(source, _prompt_field(recipe, where)) for where, source in sources.items()}
    training = chain.from_iterable([texts.pop(where) for where in trained])
    found, num_read = find_overlap(training, texts)
    num_training = sum(map(len, trained.values()))
    unread = f" (the first {num_read} of {num_training} tasks)" if num_read < num_training else ""
    return [*(_line(where, overlap, unread) for where, overlap in found.items() if overlap.matches), *unknown]


def _unknown(missing: Sequence[str]) -> str:
    of = "evaluation tasks" if any(map(is_training, missing)) else "its tasks" if len(missing) == 1 else "their tasks"
    return f"{', '.join(missing)}: not on this machine yet, so it is not known whether {of} occur in the training data"


def _prompt_field(recipe: Recipe, section: str) -> str | None:
    field = recipe.workflow_of(section).settings.get("prompt_field")
    return field if isinstance(field, str) else None


def _texts(source: TaskSource, field: str | None) -> Iterator[tuple[str, str]]:
    for place in range(len(source)):
        task = source[place]
        yield task.task_id, text_of(task, field)


def _line(where: str, overlap: Overlap, unread: str) -> str:
    count, total, near = (
        len(overlap.matches),
        overlap.num_tasks - overlap.num_unread,
        len(overlap.matches) - overlap.num_equal,
    )
    kinds = [f"{overlap.num_equal} word for word"] if overlap.num_equal else []
    kinds += [f"{near} with at least half of their words in runs of {LONG} of one training task"] if near else []
    shown = (
        f"{match.task_id} is {'' if match.equal else f'{match.share:.0%} of '}training task {match.training_task_id}: "
        f'"{_shortened(match.text)}"'
        for match in overlap.matches[:NUM_EXAMPLES]
    )
    beyond = f"; {overlap.num_unread} more tasks were not looked at" if overlap.num_unread else ""
    return (
        f"{where}: {count} of {total} tasks ({count / total:.1%}) overlap with {TRAIN}{unread}: {' and '.join(kinds)}; "
        f"{'; '.join(shown)}{beyond}"
    )


def _shortened(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:79]}…"


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
    index = _Index(evaluation, found, max_evaluation_words)
    num_read, words_left = 0, max_training_words
    for task_id, text in training:
        words = words_of(text)
        words_left -= len(words)
        if words_left < 0:
            break
        num_read += 1
        index.look_at(task_id, words)
    for one in index.texts:
        if one.equal or one.share >= 0.5:
            for name, task_id, text in one.tasks:
                match = Match(
                    task_id=task_id, training_task_id=one.training_task_id, share=one.share, equal=one.equal, text=text
                )
                found[name].matches.append(match)
    for overlap in found.values():
        overlap.matches.sort(key=lambda match: (not match.equal, -match.share))
    return found, num_read


class _Index:
    """The texts of all evaluation datasets by their words and by their runs."""

    def __init__(
        self, evaluation: Mapping[str, Iterable[tuple[str, str]]], found: Mapping[str, Overlap], max_words: int
    ) -> None:
        self.texts: list[_Text] = []
        self._by_words: dict[str, _Text] = {}
        self._vocabulary: dict[str, int] = {}  # from 1; 0 is a word of no evaluation task
        self._by_run: dict[int, list[_Text]] = {}  # by hash; of a template one more than the most
        for name, tasks in evaluation.items():
            for task_id, text in tasks:
                words = words_of(text)
                found[name].num_tasks += 1
                max_words -= len(words)
                if max_words < 0:
                    found[name].num_unread += 1
                elif words:
                    self._add(words, (name, task_id, text))

    def _add(self, words: list[str], task: tuple[str, str, str]) -> None:
        joined = " ".join(words)
        if joined in self._by_words:
            self._by_words[joined].tasks.append(task)
            return
        numbers = [self._vocabulary.setdefault(word, len(self._vocabulary) + 1) for word in words]
        run = LONG if len(words) >= LONG else SHORT if len(words) >= SHORT else 0
        text = _Text(numbers, run, [task])
        self.texts.append(text)
        self._by_words[joined] = text
        for key in {key for key, _ in _runs(numbers, run)}:
            having = self._by_run.setdefault(key, [])
            if len(having) <= MAX_TEMPLATE:
                having.append(text)

    def look_at(self, task_id: str, words: list[str]) -> None:
        """Record which evaluation tasks share words with a training task."""
        same = self._by_words.get(" ".join(words))
        if same is not None and not same.equal:
            same.equal, same.share, same.training_task_id = True, 1.0, task_id
        in_common: defaultdict[int, set[int]] = defaultdict(set)  # text -> hashes of runs
        texts: dict[int, _Text] = {}
        numbers = [self._vocabulary.get(word, 0) for word in words]
        for part in _known_parts(numbers):
            for run in (LONG, SHORT):
                for key, _ in _runs(part, run):
                    having = self._by_run.get(key, ())
                    if len(having) <= MAX_TEMPLATE:
                        for text in having:
                            texts[id(text)] = text
                            in_common[id(text)].add(key)
        for which, keys in in_common.items():
            text = texts[which]
            if not text.equal and (share := _covered(text, keys)) > text.share:
                text.share, text.training_task_id = share, task_id


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
