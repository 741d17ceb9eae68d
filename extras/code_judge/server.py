"""The HTTP interface that clients of Code Judge speak, beside gRPC. Field names, types and defaults of requests and answers
are their contract and must not change.

    GET  /ping, /status
    POST /run, /judge, each also /batch and /long-batch

Single runs are interactive, and so are batches of one, as rollouts send their tool calls; larger batches are not. A
client that leaves takes its jobs with it. A running long batch sends a space at intervals, which JSON allows before a
value, so that no proxy between client and gateway closes the connection.
"""

from __future__ import annotations

import asyncio
import enum
import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import orjson
from aiohttp import web
from pydantic import BaseModel, Field, ValidationError

from extras.code_judge.settings import HttpConfig
from services.common.aio import ended
from services.common.config.envgateway import EnvGatewayConfig
from services.common.errors import CapacityError, DeadlineError, InvalidRequestError, RollmillError
from services.common.http import Listener, json_answer
from services.common.records import encodable
from services.common.telemetry.metrics import Lane
from services.envgateway.calls import RewardOutcome
from services.envgateway.judge.compare import difference
from services.envgateway.judge.records import (
    Comparison,
    ComparisonMode,
    JudgeRequest,
    JudgeResult,
    StdinCase,
    StdinTests,
)
from services.envgateway.queue import JobQueue
from services.envgateway.rewards.registry import Rewards
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import COMPILE_TIME_S
from services.envgateway.sandbox.records import ExecutionRequest, ExecutionResult
from services.envgateway.sandbox.scheduler import on_behalf_of

CLIENT_HEADER = "X-Client-Id"
SHOWN_CHARACTERS = 1000  # of each of stdout and stderr
_KEEP_ALIVE_S = 10.0
_LONG_BATCH_WAIT_S = 3600.0  # of one run, for a slot
QUEUE_WAIT_S = 20.0  # of a run without a slot, or of one of a batch; then `queue_timeout`
BODY_BYTES = 256 << 20  # of the largest request
_LARGE_BODY = 1 << 20  # bytes from which reading JSON leaves the event loop
_STRIPPED = Comparison(mode=ComparisonMode.STRIPPED)
_IN_FLIGHT = 256  # of one batch; the others wait here, so that one batch does not fill the queue
_RETRY_S = 1.0
_OUTPUT_MARGIN = 4096  # a program may print more than expected, and be seen to
_LIMITS = (RunStatus.TIME_LIMIT, RunStatus.MEMORY_LIMIT, RunStatus.OUTPUT_LIMIT)

Model = TypeVar("Model", bound=BaseModel)


def _made_id() -> str:
    return str(uuid.uuid4())


class Reason(enum.StrEnum):
    """Why a submission has no result of its own; empty when the program was judged, right or wrong."""

    NONE = ""
    INTERNAL_ERROR = "internal_error"
    WORKER_TIMEOUT = "worker_timeout"
    QUEUE_TIMEOUT = "queue_timeout"
    INVALID_INPUT = "invalid_input"


class Submission(BaseModel):
    """One program, or with type ``math`` one answer (``solution``) and the truth (``expected_output``)."""

    sub_id: str | None = None
    type: Literal["python", "cpp", "math"]
    options: dict[str, str] | None = None
    solution: str
    input: str | None = None
    expected_output: str | None = None


class BatchSubmission(BaseModel):
    sub_id: str | None = None
    type: Literal["batch"] = "batch"
    submissions: list[Submission] = Field(min_length=1)


class SubmissionOutcome(BaseModel):
    """``success``: exit code 0 and, where an output was expected, that output; ``run_success``: exit code 0."""

    sub_id: str = Field(default_factory=_made_id)
    success: bool = False
    run_success: bool = False
    cost: float = 0.0  # seconds
    stdout: str | None = None
    stderr: str | None = None
    reason: Reason = Reason.NONE

    def shown(self, with_output: bool) -> dict[str, Any]:
        """The fields of /run (with output) or of /judge (without)."""
        return self.model_dump(exclude=None if with_output else {"stdout", "stderr"})


_REASON = {
    RunStatus.TIME_LIMIT: Reason.WORKER_TIMEOUT,
    RunStatus.INFRA_ERROR: Reason.INTERNAL_ERROR,
    RunStatus.CANCELLED: Reason.INTERNAL_ERROR,
    RunStatus.INVALID_REQUEST: Reason.INVALID_INPUT,
    RunStatus.INVALID_TESTS: Reason.INVALID_INPUT,
}


class Submissions:
    """Runs submissions; every submission gets an outcome, and only a cancellation is raised."""

    def __init__(self, queue: JobQueue, grading: Rewards, *, run_s: float, compile_s: float, output_bytes: int) -> None:
        """``run_s``, ``compile_s``: bounds of these, on top of waiting. ``output_bytes``: kept of a program's output."""
        self._queue = queue
        self._grading = grading
        self._run_s = {"python": run_s, "cpp": run_s + compile_s}
        self._output_bytes = output_bytes

    async def run(self, submission: Submission, lane: Lane, wait_s: float) -> SubmissionOutcome:
        """Run one submission; ``wait_s`` bounds the wait for a slot."""
        began = time.monotonic()
        try:
            if submission.type == "math":
                outcome = await self._math(submission)
            else:
                outcome = await self._program(submission, lane, began + wait_s + self._run_s[submission.type])
        except (CapacityError, DeadlineError):
            outcome = SubmissionOutcome(reason=Reason.QUEUE_TIMEOUT, cost=time.monotonic() - began)
        except InvalidRequestError as error:
            outcome = SubmissionOutcome(reason=Reason.INVALID_INPUT, stderr=error.message)
        except RollmillError as error:
            outcome = SubmissionOutcome(reason=Reason.INTERNAL_ERROR, stderr=error.message)
        return outcome.model_copy(update={"sub_id": submission.sub_id or outcome.sub_id})

    async def run_all(self, submissions: Sequence[Submission], lane: Lane, wait_s: float) -> list[SubmissionOutcome]:
        """A batch, in its order."""
        places = asyncio.Semaphore(_IN_FLIGHT)

        async def one(submission: Submission) -> SubmissionOutcome:
            async with places:
                return await self.run(submission, lane, wait_s)

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(submission)) for submission in submissions]
        return [task.result() for task in tasks]

    async def _program(self, submission: Submission, lane: Lane, end: float) -> SubmissionOutcome:
        expected = submission.expected_output
        stdin = submission.input or ""
        if expected is not None and len(expected.encode(errors="replace")) + _OUTPUT_MARGIN > self._output_bytes:
            request = JudgeRequest(
                code=submission.solution,
                language=submission.type,
                tests=StdinTests(cases=(StdinCase(stdin=stdin, expected=expected),)),
                comparison=_STRIPPED,
            )
            return _judged(await self._in_time(request, lane, end))
        job = ExecutionRequest(code=submission.solution, language=submission.type, stdin=stdin.encode(errors="replace"))
        return _executed(await self._in_time(job, lane, end), expected)

    async def _in_time(self, job: Any, lane: Lane, end: float) -> Any:
        """A full queue is waited for, as long as there is time."""
        while True:
            try:
                return await self._queue.run(job, lane=lane, request_id="", deadline_s=end - time.monotonic())
            except CapacityError as full:
                pause_s = full.retry_after_s or _RETRY_S
                if time.monotonic() + pause_s >= end:
                    raise
                await asyncio.sleep(pause_s)

    async def _math(self, submission: Submission) -> SubmissionOutcome:
        if submission.expected_output is None:
            raise InvalidRequestError("a math submission needs expected_output: the right answer")
        began = time.monotonic()
        result = await self._grading.compute("math", {"answer": submission.expected_output}, submission.solution)
        failed = result.outcome is RewardOutcome.GRADER_FAILED
        return SubmissionOutcome(
            success=result.outcome is RewardOutcome.CORRECT,
            run_success=not failed,
            cost=time.monotonic() - began,
            stdout="" if failed else result.outcome.value,
            stderr=result.detail,
            reason=Reason.INTERNAL_ERROR if failed else Reason.NONE,
        )


def _executed(result: ExecutionResult, expected: str | None) -> SubmissionOutcome:
    ran = result.status is RunStatus.OK
    success = ran and (expected is None or not difference(expected, result.stdout, _STRIPPED))
    stdout, stderr = result.stdout.decode(errors="replace"), result.stderr.decode(errors="replace")
    return _outcome(result.status, success, result.wall_s, stdout, stderr, result.detail)


def _judged(result: JudgeResult) -> SubmissionOutcome:
    if not result.cases:
        return SubmissionOutcome(stderr=result.detail, reason=_REASON.get(result.verdict, Reason.NONE))
    [case] = result.cases
    if case.verdict is RunStatus.WRONG_ANSWER:
        return _outcome(RunStatus.OK, False, case.wall_s, case.stdout, case.stderr, "")
    return _outcome(case.verdict, case.verdict is RunStatus.OK, case.wall_s, case.stdout, case.stderr, case.detail)


def _outcome(status: RunStatus, success: bool, cost: float, stdout: str, stderr: str, detail: str) -> SubmissionOutcome:
    return SubmissionOutcome(
        success=success,
        run_success=status is RunStatus.OK,
        cost=cost,
        stdout=stdout[:SHOWN_CHARACTERS],
        stderr=_with_why(stderr, status, detail),
        reason=_REASON.get(status, Reason.NONE),
    )


def _with_why(stderr: str, status: RunStatus, detail: str) -> str:
    """The program's own output, then the limit that ended the program."""
    limit = status.value.replace("_", " ").lower() if status in _LIMITS else ""
    why = ": ".join(part for part in (limit, detail) if part)
    if not why:
        return stderr[:SHOWN_CHARACTERS]
    return f"{stderr[: max(0, SHOWN_CHARACTERS - len(why) - 1)]}\n{why}".strip()[:SHOWN_CHARACTERS]


class HttpServer:
    """``start`` serves, ``stop`` ends. Raises ``ConfigError`` for a bind without keys, and for a taken port."""

    def __init__(self, config: HttpConfig, host: str, queue: JobQueue, submissions: Submissions) -> None:
        assert config.port is not None
        self._queue = queue
        self._submissions = submissions
        application = web.Application(client_max_size=BODY_BYTES)
        application.add_routes([web.get("/ping", self._ping), web.get("/status", self._status)])
        for name in ("run", "judge"):
            application.add_routes(web.post(f"/{name}{form}", self._answer) for form in ("", "/batch", "/long-batch"))
        self._listener = Listener(
            application, host, config.port,
            name="the HTTP interface", setting="envgateway.http.port", group="judge", leaving_cancels=True,
            reuse_port=config.reuse_port,
        )  # fmt: skip

    @property
    def port(self) -> int:
        return self._listener.port

    @property
    def routes(self) -> list[tuple[str, str]]:
        """Method and path of everything that is served."""
        return self._listener.routes

    async def start(self) -> int:
        """Returns the port."""
        return await self._listener.start()

    async def stop(self) -> None:
        await self._listener.stop()

    async def _ping(self, request: web.Request) -> web.Response:
        return json_answer("pong")

    async def _status(self, request: web.Request) -> web.Response:
        return json_answer({"queue": self._queue.num_waiting, "num_workers": self._queue.num_slots})

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        """Run the submissions of a request for its client."""
        _, name, *form = request.path.split("/")
        with_output = name == "run"
        with on_behalf_of(request.headers.get(CLIENT_HEADER) or f"http {request.remote}"):
            try:
                if not form:
                    submission = await _read(request, Submission)
                    outcome = await self._submissions.run(submission, Lane.INTERACTIVE, QUEUE_WAIT_S)
                    return json_answer(outcome.shown(with_output))
                batch = await _read(request, BatchSubmission)
            except ValidationError as error:
                return json_answer({"detail": _details(error)}, status=422)
            if form == ["long-batch"]:
                return await self._long_batch(request, batch, with_output)
            return json_answer(await self._run_all(batch, with_output, QUEUE_WAIT_S))

    async def _long_batch(self, request: web.Request, batch: BatchSubmission, with_output: bool) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        running = asyncio.ensure_future(self._run_all(batch, with_output, _LONG_BATCH_WAIT_S))
        try:
            while not (await asyncio.wait([running], timeout=_KEEP_ALIVE_S))[0]:
                await response.write(b" ")
        finally:
            await ended(running)
        await response.write_eof(orjson.dumps(encodable(running.result())))
        return response

    async def _run_all(self, batch: BatchSubmission, with_output: bool, wait_s: float) -> dict[str, Any]:
        lane = Lane.BATCH if len(batch.submissions) > 1 else Lane.INTERACTIVE
        outcomes = await self._submissions.run_all(batch.submissions, lane, wait_s)
        return {"sub_id": batch.sub_id or _made_id(), "results": [outcome.shown(with_output) for outcome in outcomes]}


def make_server(config: EnvGatewayConfig, queue: JobQueue, rewards: Rewards) -> HttpServer:
    """The server of a gateway's queue and rewards."""
    limits = config.sandbox
    submissions = Submissions(
        queue, rewards, run_s=limits.wall_time_s, compile_s=COMPILE_TIME_S, output_bytes=limits.output_bytes
    )
    return HttpServer(config.extra("http"), config.host, queue, submissions)


async def _read(request: web.Request, model: type[Model]) -> Model:
    """Raises ``ValidationError``."""
    body = await request.read()
    if len(body) > _LARGE_BODY:
        return await asyncio.to_thread(model.model_validate_json, body)
    return model.model_validate_json(body)


def _details(error: ValidationError) -> list[dict[str, Any]]:
    """One entry per problem, as clients know them from a 422."""
    return [
        {"type": problem["type"], "loc": ["body", *problem["loc"]], "msg": problem["msg"]}
        for problem in error.errors(include_url=False, include_input=False, include_context=False)
    ]
