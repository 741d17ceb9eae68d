"""Other prompts that an engine may have read instead of a row's own: for ``probes``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from jinja2 import TemplateError

ONE_TOKEN, TEMPLATE = "one token more or less", "template"
SYSTEM = {"no": None, "an empty": "", "the usual": "You are a helpful assistant."}

Change = Callable[[list[int]], list[int]]


def prompt_changes(tokenizer: Any) -> list[tuple[str, str, Change]]:
    """Changes of a prompt's tokens, each with its cause and a label."""
    encoded = partial(tokenizer.encode, add_special_tokens=False)
    found: list[tuple[str, str, Change]] = [
        (TEMPLATE, "its text tokenised again", lambda ids: encoded(tokenizer.decode(ids))),
        (ONE_TOKEN, "without the first token", lambda ids: ids[1:]),
        (ONE_TOKEN, "without the last token", lambda ids: ids[:-1]),
        (ONE_TOKEN, "the first token twice", lambda ids: [*ids[:1], *ids]),
        (ONE_TOKEN, "the last token twice", lambda ids: [*ids, *ids[-1:]]),
    ]
    special = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id} - {None}
    for token in sorted({*special, *encoded("\n"), *encoded(" ")}):
        name = repr(tokenizer.decode([token]))
        found.append((ONE_TOKEN, f"{name} in front", lambda ids, token=token: [token, *ids]))  # type: ignore[misc]
        found.append((ONE_TOKEN, f"{name} behind", lambda ids, token=token: [*ids, token]))  # type: ignore[misc]
    if not getattr(tokenizer, "chat_template", None):
        return found

    def rendered(text: str, system: str | None = None, **settings: Any) -> str:
        turns = [{"role": "system", "content": system}] * (system is not None) + [{"role": "user", "content": text}]
        settings = {"add_generation_prompt": True, **settings}
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, **settings))
        except TemplateError:  # of a template without system turns
            return ""

    begin, _, end = rendered("MARK").partition("MARK")

    def again(render: Callable[[str], str]) -> Change:
        """The prompt's only message rendered in another way."""
        return lambda ids: encoded(render(tokenizer.decode(ids).removeprefix(begin).removesuffix(end)))

    ways: dict[str, Callable[[str], str]] = {
        "without its template": lambda text: text,
        "without the opening of the answer": partial(rendered, add_generation_prompt=False),
        "without thinking": partial(rendered, enable_thinking=False),
        **{f"in its template, {name} system turn": partial(rendered, system=text) for name, text in SYSTEM.items()},
    }
    return [*found, *((TEMPLATE, label, again(render)) for label, render in ways.items())]
