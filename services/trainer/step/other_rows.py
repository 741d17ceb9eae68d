"""Rows as an engine may have read them instead: with another prompt, or with its values one token off. For ``probes``."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np

from services.common.records.kept_tokens import KeptSets
from services.trainer.data.packing import NO_VERSION, Document

ONE_TOKEN, TEMPLATE = "one token more or less", "template"


def shifted(document: Document, by: int) -> Document:
    """The document with each engine's value at the trained token before or behind it."""
    trained = np.flatnonzero(document.loss_mask)
    behaviour, versions = document.behaviour.copy(), document.weight_versions.copy()
    behaviour[trained] = np.roll(behaviour[trained], by)
    versions[trained[0 if by > 0 else -1]] = NO_VERSION  # its value came from the other end
    return replace(document, behaviour=behaviour, weight_versions=versions)


def with_prompt(document: Document, change: Callable[[list[int]], Seq[int]]) -> Document:
    """The document with other tokens before its first trained one; itself where the change keeps them."""
    start = int(document.loss_mask.argmax())
    before = document.token_ids[:start].tolist()
    prompt = list(change(before)) or before
    if prompt == before:
        return document
    kept = document.kept
    if kept is not None:
        kept = KeptSets.concatenated(
            [KeptSets.whole(len(prompt)), kept.select(np.arange(document.num_tokens) >= start)]
        )

    def behind(values: Any, filler: float) -> Any:
        return np.concatenate([np.full(len(prompt), filler, dtype=values.dtype), values[start:]])

    return replace(
        document,
        token_ids=np.concatenate([np.array(prompt, dtype=np.int32), document.token_ids[start:]]),
        loss_mask=behind(document.loss_mask, False),
        behaviour=behind(document.behaviour, 0.0),
        weight_versions=behind(document.weight_versions, NO_VERSION),
        mixed_cache=behind(document.mixed_cache, False),
        kept=kept,
        temperatures=None if document.temperatures is None else behind(document.temperatures, math.nan),
    )


PromptChange = tuple[str, str, Callable[[list[int]], Seq[int]]]


def prompt_changes(tokenizer: Any) -> list[PromptChange]:
    """Other prompts that an engine may have read, each with its cause and a label."""

    def encoded(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False))

    found: list[PromptChange] = [
        (TEMPLATE, "the prompt's text tokenised again", lambda ids: encoded(tokenizer.decode(ids))),
        (ONE_TOKEN, "the first token left out", lambda ids: ids[1:]),
        (ONE_TOKEN, "the last token left out", lambda ids: ids[:-1]),
        (ONE_TOKEN, "the first token twice", lambda ids: [*ids[:1], *ids]),
        (ONE_TOKEN, "the last token twice", lambda ids: [*ids, *ids[-1:]]),
    ]
    single = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    single |= {text[0] for text in map(encoded, ("\n", " ")) if len(text) == 1}
    for token in sorted(single):
        name = repr(tokenizer.decode([token]))
        found.append((ONE_TOKEN, f"{name} before the prompt", lambda ids, t=token: [t, *ids]))  # type: ignore[misc]
        found.append((ONE_TOKEN, f"{name} behind the prompt", lambda ids, t=token: [*ids, t]))  # type: ignore[misc]
    if not getattr(tokenizer, "chat_template", None):
        return found

    def rendered(text: str, system: str | None = None, **settings: Any) -> str:
        turns = [{"role": "user", "content": text}]
        if system is not None:
            turns.insert(0, {"role": "system", "content": system})
        settings = {"add_generation_prompt": True, **settings}
        return str(tokenizer.apply_chat_template(turns, tokenize=False, **settings))

    mark = "MARK"
    begin, _, end = rendered(mark).partition(mark)
    opening = end[len(rendered(mark, add_generation_prompt=False).partition(mark)[2]) :]  # of the answer

    def again(render: Callable[[str], str]) -> Callable[[list[int]], list[int]]:
        def change(ids: list[int]) -> list[int]:
            text = str(tokenizer.decode(ids))
            inner = text.removeprefix(begin).removesuffix(end) if text.startswith(begin) else text
            return encoded(render(inner))

        return change

    def toggled(ids: list[int]) -> list[int]:
        text = str(tokenizer.decode(ids))
        return encoded(text.removesuffix(opening) if text.endswith(opening) else text + opening)

    renders: dict[str, Callable[[str], str]] = {
        "the prompt in its template": rendered,
        "the prompt without its template": lambda text: text,
        "the prompt with an empty system turn": lambda text: rendered(text, ""),
        "the prompt with a usual system turn": lambda text: rendered(text, "You are a helpful assistant."),
        "the prompt with thinking switched off": lambda text: rendered(text, enable_thinking=False),
    }
    found.append((TEMPLATE, "the prompt with or without the opening of the answer", toggled))
    return [*found, *((TEMPLATE, label, again(render)) for label, render in renders.items())]
