"""The queue of executions and judgements in front of a sandbox, which is here or at workers (``queue.redis``).

    run ──> same key? ──> equal judgement in flight? ──> a place ──> Scheduler: lane, client ──> runner ──> result

Servers set the client of a call at their edge (``on_behalf_of``); every task that the call starts inherits the client.
"""

from __future__ import annotations

import asyncio
import base64
import enum
import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, TypeAlias, TypeVar, get_args, get_type_hints, overload

from services.common.aio import deadline
from services.common.errors import CapacityError, DeadlineError, InvalidRequestError
from services.common.telemetry.metrics import Lane, waiting_gauge
from services.common.text.literals import to_tree
from services.envgateway.calls import SharedCalls, take_place
from services.envgateway.judge import records
from services.envgateway.judge.judge import Judge
from services.envgateway.judge.records import JudgeRequest, JudgeResult
from services.envgateway.sandbox.bare.plain import from_tree
from services.envgateway.sandbox.bare.statuses import RunStatus
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.sandbox.records import ExecutionLimits, ExecutionRequest, ExecutionResult

Job: TypeAlias = ExecutionRequest | JudgeRequest
JobResult: TypeAlias = ExecutionResult | JudgeResult
Runner: TypeAlias = Callable[[Job, Lane], Awaitable[JobResult]]  # cancelling it kills the job
Result = TypeVar("Result")

LANE_SIZE = 4096  # jobs waiting in each lane, before callers are told to come back
_STORED_RESULTS = 16384
_STORED_BYTES = 64 << 20
_RETRY_FROM_S = 0.5
_RETRY_AT_MOST_S = 30.0
_BRIEF_S = 0.03  # of a turn, on average

_client: ContextVar[str] = ContextVar("client", default="")


def current_client() -> str:
    """Empty for the gateway itself."""
    return _client.get()


@contextmanager
def on_behalf_of(client: str) -> Iterator[None]:
    """The code inside, and the tasks that the code starts, work for this client."""
    token = _client.set(client)
    try:
        yield
    finally:
        _client.reset(token)


def sandbox_runner(sandbox: SandboxPool, judge: Judge) -> Runner:
    """Runs jobs in this process's own sandbox."""

    async def run(job: Job, lane: Lane) -> JobResult:
        return await (judge.judge(job, lane) if isinstance(job, JudgeRequest) else sandbox.run(job, lane))

    return run


def is_about_the_program(result: JobResult) -> bool:
    """False for a result that may be tried again and never becomes a reward."""
    status = result.verdict if isinstance(result, JudgeResult) else result.status
    return status.is_about_the_program


def infrastructure_failure(job: Job, detail: str) -> JobResult:
    """The result of a job that the machinery could not run."""
    if isinstance(job, JudgeRequest):
        return JudgeResult(verdict=RunStatus.INFRA_ERROR, detail=detail)
    return ExecutionResult(status=RunStatus.INFRA_ERROR, detail=detail)


def batch_share(num_slots: int) -> int:
    """The most slots that batch requests may use together: one less than there are, where there are several.

    >>> [batch_share(n) for n in (1, 2, 8)]
    [1, 1, 7]
    """
    return max(1, num_slots - 1)


class Scheduler:
    """Decides the next user of a slot: ``await scheduler.run(lane, client, work)`` holds one while the work is done.

        interactive (a rollout waits) --> |
                                          | --> at most ``num_slots`` at once
        batch (judging)               --> |     at most ``batch_slots`` of them for batch

    Interactive goes before batch. Within a lane clients take turns, and each client's jobs are first come first served.
    A full lane refuses the client with the most waiting jobs there, not the last one to arrive. While jobs are brief,
    some are let through ahead of a slot, so that no slot is idle between two of them; these wait at the sandbox, which
    has the same order of lanes.
    """

    def __init__(self, *, num_slots: int, batch_slots: int, lane_size: int, sends_ahead: bool = False) -> None:
        """``sends_ahead``: behind the slots is a sandbox, where a job may wait for one."""
        self._lane_size = lane_size
        self._sends_ahead = sends_ahead
        # by client, whose turn is next the first; no client without turns is kept
        self._waiting: dict[Lane, OrderedDict[str, OrderedDict[asyncio.Future[None], None]]] = {
            lane: OrderedDict() for lane in Lane
        }
        self._running: Counter[Lane] = Counter()
        self._mean_s = 0.05  # of a job, for telling when to come back
        self._num_refused = 0
        self.num_slots = num_slots
        self._batch_slots = batch_slots

    def resize(self, num_slots: int, batch_slots: int) -> None:
        """Change the number of slots, from the next turn on."""
        self.num_slots = num_slots
        self._batch_slots = batch_slots
        self._wake()

    def num_waiting(self, lane: Lane) -> int:
        return sum(map(len, self._waiting[lane].values()))

    @property
    def gauges(self) -> dict[str, float]:
        return {
            **{waiting_gauge(lane): float(self.num_waiting(lane)) for lane in Lane},
            **{f"queue_{lane}_running": float(self._running[lane]) for lane in Lane},
            "queue_mean_s": self._mean_s,
            "queue_refused": float(self._num_refused),
        }

    async def run(
        self, lane: Lane, client: str, work: Callable[[], Awaitable[Result]], wait_s: float | None = None
    ) -> Result:
        """Await a call while the caller holds a slot.

        Raises ``CapacityError`` when too many wait, or after a wait of ``wait_s``. Cancelling the waiter gives up its place.
        """
        try:
            async with asyncio.timeout(wait_s):
                await self._take(lane, client)
        except TimeoutError:
            raise self._full(lane) from None
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            return await work()
        finally:
            self._mean_s += 0.05 * (clock() - began - self._mean_s)
            self._running[lane] -= 1
            self._wake()

    async def _take(self, lane: Lane, client: str) -> None:
        waiting = self._waiting[lane]
        if self._may_start(lane) and not waiting:
            self._running[lane] += 1
            return
        if self.num_waiting(lane) >= self._lane_size:
            self._num_refused += 1
            longest = max(waiting.values(), key=len)
            if len(waiting.get(client, ())) + 1 >= len(longest):
                raise self._full(lane)
            newest, _ = longest.popitem()
            if not newest.done():
                newest.set_exception(self._full(lane))
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiting.setdefault(client, OrderedDict())[turn] = None
        try:
            await turn
        except asyncio.CancelledError:
            if turn in (own := waiting.get(client, OrderedDict())):
                del own[turn]
                if not own:
                    del waiting[client]
            elif not turn.cancelled() and turn.exception() is None:
                self._running[lane] -= 1  # the turn was given in the very moment of leaving: pass the turn on
                self._wake()
            raise

    def _full(self, lane: Lane) -> CapacityError:
        num_waiting = self.num_waiting(lane)
        drained_s = num_waiting * self._mean_s / self.num_slots
        return CapacityError(
            f"{num_waiting} executions are waiting in the {lane} lane for {self.num_slots} slots",
            retry_after_s=min(max(drained_s / 2, _RETRY_FROM_S), _RETRY_AT_MOST_S),
        )

    def _may_start(self, lane: Lane) -> bool:
        ahead = self.num_slots if self._sends_ahead and self._mean_s < _BRIEF_S else 0
        interactive, batch = self._running[Lane.INTERACTIVE], self._running[Lane.BATCH]
        if interactive + min(batch, self._batch_slots) >= self.num_slots + ahead:
            return False
        return lane is Lane.INTERACTIVE or (batch < self._batch_slots + ahead and not self._waiting[Lane.INTERACTIVE])

    def _wake(self) -> None:
        for lane in (Lane.INTERACTIVE, Lane.BATCH):
            waiting = self._waiting[lane]
            while waiting and self._may_start(lane):
                client, turns = waiting.popitem(last=False)
                turn, _ = turns.popitem(last=False)
                if turns:
                    waiting[client] = turns
                if not turn.done():
                    self._running[lane] += 1
                    turn.set_result(None)


class JobQueue:
    """Runs programs when their turn has come. Cancelling the caller removes a waiting job, or kills a running one.

    Equal judgements of one client in one lane that wait or run at the same time are one job. Nothing of them is kept
    after the last caller. Executions are never shared: a tool call may draw numbers of its own.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler) -> None:
        self._runner = runner
        self._scheduler = scheduler
        self._by_key: SharedCalls[JobResult] = SharedCalls(
            _STORED_RESULTS, keep=is_about_the_program, weigh=_weight, max_weight=_STORED_BYTES
        )
        self._judging: SharedCalls[JobResult] = SharedCalls(0)
        self.counts: Counter[str] = Counter()

    @overload
    async def run(
        self, job: ExecutionRequest, *, lane: Lane, request_id: str, deadline_s: float
    ) -> ExecutionResult: ...
    @overload
    async def run(
        self,
        job: JudgeRequest,
        *,
        lane: Lane,
        request_id: str,
        deadline_s: float,
        wait_s: float | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> JudgeResult: ...
    async def run(
        self,
        job: Job,
        *,
        lane: Lane,
        request_id: str,
        deadline_s: float,
        wait_s: float | None = None,
        places: asyncio.Semaphore | None = None,
    ) -> Any:
        """Run a job.

        ``request_id`` is the key of the job, empty for none: the same job under the same key joins the running one or
        gets the stored result. ``deadline_s`` bounds waiting and running together, ``wait_s`` waiting alone. The job
        takes one of ``places`` before it waits for its turn, and keeps it to its end.

        Raises:
            CapacityError: too many wait already, or no slot came free within ``wait_s``; says when to come back.
            DeadlineError: no result within ``deadline_s`` seconds; a running program was killed.
        """
        # Another job under the same key is another job: no caller gets the result of another program.
        digest = _digest(job) if request_id or isinstance(job, JudgeRequest) else ""
        key = f"{request_id} {digest}" if request_id else ""
        client = current_client()
        judging = f"{lane} {wait_s} {digest} {client}" if digest and isinstance(job, JudgeRequest) else ""

        async def in_turn() -> JobResult:
            if places is not None:
                await take_place(places, wait_s, "other programs of this task are being judged")
            try:
                return await self._scheduler.run(lane, client, lambda: self._runner(job, lane), wait_s)
            finally:
                if places is not None:
                    places.release()

        async def once() -> JobResult:
            self.counts["joined"] += judging in self._judging
            return await self._judging.run(judging, in_turn)

        try:
            async with deadline(deadline_s, f"execution {request_id or 'without id'} in the {lane} lane"):
                return await self._by_key.run(key, once)
        except DeadlineError:
            self.counts["expired"] += 1
            raise

    def start(self) -> None:
        """Call before the first job."""

    async def failed(self) -> None:
        """Wait for a permanent failure and raise the failure. None can occur here: cancel the wait."""
        await asyncio.Event().wait()

    async def close(self) -> None:
        """Call after the last job."""

    @property
    def gauges(self) -> dict[str, float]:
        """Numbers for GetStatus."""
        return {
            **self._scheduler.gauges,
            "queue_stored_results": float(len(self._by_key)),
            **{f"queue_{name}": float(count) for name, count in self.counts.items()},
        }

    @property
    def num_waiting(self) -> int:
        """Jobs without a slot."""
        return sum(map(self._scheduler.num_waiting, Lane))

    @property
    def num_slots(self) -> int:
        """Jobs that can run at once, here or at all workers together."""
        return self._scheduler.num_slots


def local_queue(sandbox: SandboxPool, judge: Judge, *, num_slots: int, lane_size: int = LANE_SIZE) -> JobQueue:
    """The queue in front of this process's own sandbox. Where there are several slots, one is never given to batch."""
    scheduler = Scheduler(
        num_slots=num_slots, batch_slots=batch_share(num_slots), lane_size=lane_size, sends_ahead=True
    )
    return JobQueue(sandbox_runner(sandbox, judge), scheduler)


def _weight(result: JobResult) -> int:
    """About the bytes that a stored result takes."""
    if isinstance(result, JudgeResult):
        return 500 + sum(500 + len(case.stdout) + len(case.stderr) + len(case.detail) for case in result.cases)
    return 500 + len(result.stdout) + len(result.stderr)


def _digest(job: Job) -> str:
    """Of all that decides the result; empty for tests that are no data, which the judge refuses."""
    try:
        return hashlib.blake2b(encode(job), digest_size=16).hexdigest()
    except (ValueError, TypeError, RecursionError):
        return ""


# -- jobs and results as bytes ---------------------------------------------------------------------------------------

_RECORDS = {
    kind.__name__: kind
    for kind in (
        ExecutionRequest, ExecutionLimits, ExecutionResult, JudgeRequest, JudgeResult, records.CaseResult,
        records.Comparison, records.StdinTests, records.StdinCase, records.CallTests, records.CallCase,
        records.AssertTests,
    )
}  # fmt: skip
_DATA = (Any, tuple[Any, ...], dict[str, Any])  # values of calls: as trees, which keep types that JSON loses


def encode(record: Job | JobResult) -> bytes:
    """JSON with the name of each class under ``""``. Escaped ASCII, so that lone surrogates in a program survive.

    >>> decode(encode(ExecutionRequest(code="print(1)"))).code
    'print(1)'
    """
    return json.dumps(_to_json(type(record), record), separators=(",", ":")).encode()


def decode(data: bytes) -> Any:
    """The job or the result. Raises ``InvalidRequestError`` for a record that another version may have written."""
    try:
        return _from_json(Any, json.loads(data), is_data=False)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        raise InvalidRequestError(f"not of this version: {error!r}") from None


@lru_cache(None)
def _hints(name: str) -> dict[str, Any]:
    return get_type_hints(_RECORDS[name])


def _to_json(hint: Any, value: Any) -> Any:
    if (kind := type(value).__name__) in _RECORDS:
        return {"": kind, **{name: _to_json(of, getattr(value, name)) for name, of in _hints(kind).items()}}
    if hint in _DATA:
        return to_tree(value)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, tuple):
        return [_to_json(get_args(hint)[0], item) for item in value]
    return value


def _from_json(hint: Any, value: Any, is_data: bool = True) -> Any:
    if is_data and hint in _DATA:
        return from_tree(value)
    if isinstance(value, dict):
        hints = _hints(kind := value.pop(""))
        return _RECORDS[kind](**{name: _from_json(hints[name], part) for name, part in value.items()})
    if isinstance(value, list):
        return tuple(_from_json(get_args(hint)[0], item) for item in value)
    if isinstance(value, str):
        for kind in get_args(hint) or (hint,):
            if kind is bytes:
                return base64.b64decode(value)
            if isinstance(kind, type) and issubclass(kind, enum.Enum):
                return kind(value)
    return value
