"""``single_turn``: one prompt, one generation, one reward."""

from __future__ import annotations

from typing import ClassVar

from services.common.records.types import Task
from services.inference.workflows.base import Outcome, WorkflowContext
from services.inference.workflows.codegen.program_prompts import asking_for_program
from services.inference.workflows.custom import Workflow, WorkflowSettings
from services.inference.workflows.prompts import build_messages


class SingleTurnSettings(WorkflowSettings):
    programs: bool = False
    """Ask for a program, as `codegen_verifier` asks its coder: the row's tests decide whether the program
    reads stdin or has a function of some name."""


class SingleTurn(Workflow):
    Settings: ClassVar[type[WorkflowSettings]] = SingleTurnSettings

    async def run(self, task: Task, context: WorkflowContext) -> Outcome:
        messages = build_messages(self.settings, task)
        if self.settings.programs:
            messages = asking_for_program(messages, task)
        chat = self.converse(task, context, messages=messages)
        await chat.respond()
        return chat.outcome(await chat.grade())
