"""Asks for a program as the task's tests will run it: one that reads stdin, or a function of the right name.

``codegen_verifier`` and ``single_turn`` ask with the same words, so that one coder can be compared with the other.
"""

from __future__ import annotations

from collections.abc import Mapping

from services.common.records.types import Task
from services.common.text.chat import Message
from services.inference.workflows.codegen import codegen_prompts
from services.inference.workflows.codegen.generated_cases import entry_point_of
from services.inference.workflows.prompts import fill, with_last_text


def asking_for_program(
    messages: list[Message],
    task: Task,
    program_prompt: str = codegen_prompts.WRITE_PROGRAM,
    function_prompt: str = codegen_prompts.WRITE_FUNCTION,
) -> list[Message]:
    """The conversation with its last turn inside the prompt; unchanged if the tests do not name an entry point."""
    tests = task.data.get("tests")
    entry_point = entry_point_of(tests if isinstance(tests, Mapping) else {})
    if entry_point is None:
        return messages
    template = function_prompt if entry_point else program_prompt
    problem = str(messages[-1]["content"])
    return with_last_text(messages, fill(template, problem=problem, entry_point=entry_point))
