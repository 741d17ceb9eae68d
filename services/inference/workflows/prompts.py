"""Builds the messages of a prompt from a dataset row; the settings that all built-in workflows share."""

from __future__ import annotations

import re

from pydantic import Field

from services.common.config.base import Section
from services.common.errors import DatasetError
from services.common.records.dataset_rows import prompt_in
from services.common.records.types import Task
from services.common.text.chat import Message


class PromptSettings(Section):
    policy: str | None = None
    """The policy that plays; left out, the only one of the recipe."""
    prompt_field: str | None = None
    """Column with the prompt: text, or a list of messages. Left out, the first of `messages`, `prompt`, `problem`
    and `question` that a row has."""
    system: str | None = None
    """System turn before a prompt that has none."""
    instruction: str = ""
    """Text after the last user turn, such as "Reason step by step and put the answer into \\boxed{}.". It follows after a
    blank line, unless one of them has white space there already, or it begins with a mark that goes on with the turn."""
    thinking: bool | None = None
    """Turn the thinking of the chat template on or off, if supported (Qwen3); left out, the template's default."""
    max_prompt_tokens: int | None = Field(default=None, ge=1)
    """A longer prompt is a failed rollout (PROMPT_TOO_LONG); left out, the context is the bound."""

    def named_policies(self) -> tuple[str, ...]:
        """The policy that the settings name, if they do."""
        return () if self.policy is None else (self.policy,)


def build_messages(
    settings: PromptSettings, task: Task, system_suffix: str = "", *, bare: bool = False
) -> list[Message]:
    """The messages of a task, with the system turn and the instruction of the settings; ``bare``: without the instruction.

    A row's ``starter_code`` is shown after the last user turn, unless the turn has the code already.
    """
    messages = _with_starter_code(_messages_of(settings.prompt_field, task), task)
    has_system = messages[0].get("role") == "system"
    system = str(messages[0]["content"]) if has_system else (settings.system or "")
    if system_suffix:
        system = f"{system}\n\n{system_suffix}" if system else system_suffix
    if has_system:
        messages = messages[1:]
    if settings.instruction and not bare:
        if not messages or not isinstance(messages[-1].get("content"), str):
            raise DatasetError(f"task {task.task_id}: the instruction needs a last message with text")
        messages = with_last_text(messages, with_instruction(messages[-1]["content"], settings.instruction))
    return [{"role": "system", "content": system}, *messages] if system else messages


def with_instruction(text: str, instruction: str) -> str:
    r"""The text of a turn with the instruction after it, and a blank line between words that would touch.

    >>> with_instruction("2 + 2?", "Answer with a number."), with_instruction("2 + 2", " = ?")
    ('2 + 2?\n\nAnswer with a number.', '2 + 2 = ?')
    """
    are_glued = text[-1:].strip() and instruction[:1].strip() and instruction[0] not in ".,;:!?)"
    return f"{text}\n\n{instruction}" if are_glued else text + instruction


def _with_starter_code(messages: list[Message], task: Task) -> list[Message]:
    code = task.data.get("starter_code")
    text = messages[-1].get("content")
    if not isinstance(code, str) or not code.strip() or not isinstance(text, str) or code.strip() in text:
        return messages
    return with_last_text(messages, f"{text}\n\nStarter code:\n\n```python\n{code.strip(chr(10))}\n```")


def with_last_text(messages: list[Message], text: str) -> list[Message]:
    """The same conversation with another last user turn."""
    return [*messages[:-1], {**messages[-1], "content": text}]


def fill(template: str, **values: str) -> str:
    """Put values for ``{names}``, all at once: braces in a value or elsewhere in the template stay as they are.

    >>> fill("{a} and {b}, \\\\boxed{}", a="{b}", b="c")
    '{b} and c, \\\\boxed{}'
    """
    pattern = re.compile("|".join(re.escape(f"{{{name}}}") for name in values))
    return pattern.sub(lambda found: values[found.group()[1:-1]], template)


def _messages_of(field: str | None, task: Task) -> list[Message]:
    prompt = prompt_in(task.data, field, f"task {task.task_id}")
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
