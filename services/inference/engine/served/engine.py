"""The production engine: servers as child processes, several for one policy, called over HTTP.

    generate -> admission (a server with room) -> calls of servers -> segments by the servers' own version spans
    update   -> stage -> every server: pause, read, flush, go on
    a server dies -> its requests go on elsewhere with their tokens; the server is restarted

All code runs in the event loop that calls ``start``, which must be the main thread's: the servers end with that thread.
Seeds are not passed on: requests that run together change a server's arithmetic, so equal seeds do not give equal samples.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import structlog

from services.common.aio import backoff
from services.common.config.processes.servers import MASK_TOKENS
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError
from services.common.records.types import Logprobs
from services.common.telemetry.log_events import LogEvent
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    KvPolicy,
    ScoreRequest,
)
from services.inference.engine.requests import check_request
from services.inference.engine.served.admission import AdmissionQueue
from services.inference.engine.served.client import Chunk, Finish, Refused, TokenStream
from services.inference.engine.served.fleet import Fleet
from services.inference.engine.served.request_state import (
    CallOutput,
    CertainTokens,
    Interrupted,
    NotFinite,
    RequestState,
    judge,
)
from services.inference.engine.served.server import Server
from services.inference.engine.served.stage import Stage
from services.inference.engine.served.transfer import Transfer
from services.inference.engine.weight_update import WeightUpdate, check_update

log = structlog.get_logger(__name__)

ABORT_TIMEOUT_S = 3.0  # for a server to end an aborted call; then the tokens so far are taken
SETTLE_S = 0.02  # of silence, after which tokens that were on their way have arrived
SETTLE_TIMEOUT_S = 2.0
_MAX_INTERRUPTIONS = 5  # of one request, by servers that die or refuse


class ServedEngine:
    """``stage`` holds the weights that ``servers`` start with; ``context_length`` counts prompt and new tokens."""

    def __init__(
        self,
        servers: Sequence[Server],
        stage: Stage,
        transfer: Transfer,
        *,
        context_length: int,
        vocab_size: int | None,
        kv_policy: KvPolicy = KvPolicy.RECOMPUTE,
        restarts: int = 5,
        stall_timeout_s: float = 300.0,
        chunk_tokens: int = 16,
        on_tokens: Callable[[int, float], None] | None = None,
    ) -> None:
        self.servers = servers
        self._program = servers[0].program
        self._stage = stage
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._kv_policy = kv_policy
        self._stall_timeout_s = stall_timeout_s
        self._chunk_tokens = chunk_tokens
        self._on_tokens = on_tokens
        self._admission = AdmissionQueue(servers)
        self._fleet = Fleet(
            servers,
            stage,
            transfer,
            restarts=restarts,
            changed=self._admission.dispatch,
            lost=self._admission.forget,
            failed=self._fail,
        )
        self._by_id: dict[str, RequestState] = {}
        self._version = stage.version
        self._generated = 0
        self._failure: str | None = "the engine is not started"

    # -- the protocol -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when every server serves; ``InfrastructureError`` or ``DeadlineError`` with a server's last output."""
        await self._fleet.start()
        self._failure = None

    async def generate(self, request: GenerationRequest) -> Generation:
        if self._failure is not None:
            raise InfrastructureError(f"engine: {self._failure}")
        if request.request_id in self._by_id:
            raise InvalidRequestError(f"request {request.request_id!r} is already being generated")
        check_request(request, context_length=self._context_length, vocab_size=self._vocab_size)
        if request.sampling.top_k > MASK_TOKENS:
            raise InvalidRequestError(
                f"request {request.request_id!r}: top_k is {request.sampling.top_k}; {self._program.name} tells of at most "
                f"{MASK_TOKENS} tokens which could be drawn: write fewer, or 0 (off)"
            )
        state = RequestState(request, self._context_length - len(request.prompt_ids))
        self._by_id[request.request_id] = state
        try:
            return await self._play(state)
        finally:
            del self._by_id[request.request_id]

    async def score(self, request: ScoreRequest) -> Logprobs:
        raise ConfigError(
            f"the {self._program.section} engine cannot score tokens for distillation: name the teacher's model in "
            "algorithm.distillation.teacher_model, or write engine: torch"
        )

    async def abort(self, request_id: str) -> None:
        if (state := self._by_id.get(request_id)) is not None:
            state.abort()

    async def pause(self) -> None:
        await self._fleet.pause()
        await self._settle()

    async def resume(self) -> None:
        await self._fleet.resume()

    async def update(self, update: WeightUpdate) -> float:
        if self._failure is not None:
            raise InfrastructureError(f"engine: {self._failure}")
        check_update(update, self._stage.shapes)
        seconds = await self._fleet.switch(update)
        self._version = update.version
        log.info(LogEvent.ENGINE_UPDATED, version=update.version, live=len(self._by_id), seconds=round(seconds, 4))
        return seconds

    async def flush(self) -> None:
        await self._fleet.flush()

    @property
    def version(self) -> int:
        return self._version

    def health(self) -> EngineHealth:
        serving = [server for server in self.servers if server.serving]
        running = sum(server.in_flight for server in self.servers)
        state = "paused" if self._fleet.paused else "running"
        if len(serving) < len(self.servers):
            state = f"{len(serving)} of {len(self.servers)} {self._program.name} servers are running"
        return EngineHealth(
            ok=self._failure is None,
            detail=self._failure or state,
            running=running,
            waiting=self._admission.num_waiting,
            free_slots=sum(max(0, server.window.size - server.in_flight) for server in serving),
            generated_tokens=self._generated,
        )

    async def stop(self) -> None:
        self._fail("the engine is stopped")
        await self._fleet.stop()
        self._stage.remove()

    # -- the life of a request ----------------------------------------------------------------------------------

    async def _play(self, state: RequestState) -> Generation:
        interruptions, delays = 0, backoff(0.2)
        while (reason := state.ended()) is None:
            server = await self._admission.enter(state)
            if server is None:
                continue  # the request was aborted
            try:
                ended_here = not state.aborted and await self._run_call(state, server)
            except Interrupted as interrupted:
                interruptions += 1
                self._check_alive()
                if interruptions >= _MAX_INTERRUPTIONS:
                    raise InfrastructureError(
                        f"request {state.request.request_id!r} was interrupted {interruptions} times, last: {interrupted}"
                    ) from interrupted
                log.warning(
                    "engine_server.interrupted",
                    request=state.request.request_id,
                    server=server.name,
                    kept_tokens=len(state.tokens),
                    error=str(interrupted),
                )
                await asyncio.sleep(next(delays))
                continue
            finally:
                self._admission.leave(server)
            if ended_here:
                return state.generation(FinishReason.STOP)
        return state.generation(reason)

    async def _run_call(self, state: RequestState, server: Server) -> bool:
        """Continue a request at a server. True when the request's ``watch`` has ended it.

        ``Interrupted``: the call broke; the tokens of known version were taken.
        """
        request = state.next_call(self._chunk_tokens, server.adapter)
        output, certain = CallOutput(), CertainTokens(server)
        mixed_from: int | None = 1 if self._kv_policy is KvPolicy.KEEP else None
        stale = server.stale_prefixes
        finish: Finish | None = None
        try:
            async with AsyncExitStack() as leaving:
                with self._suspecting(server):
                    stream = await leaving.enter_async_context(server.client.generate(request))
                while finish is None:
                    chunk = await self._next(stream, state, output, server, request.rid)
                    if chunk is None:
                        break
                    certain.note(len(output.tokens))
                    if stale and chunk.cached_tokens:
                        mixed_from = 0
                    finish = chunk.finish
                    self._accept(chunk, output, state)
        except asyncio.CancelledError:
            self._fleet.ask(server, request.rid)
            raise
        except NotFinite:
            self._fleet.ask(server, request.rid)
            raise
        except Refused as error:
            if 400 <= error.status < 500:
                raise InvalidRequestError(f"request {state.request.request_id!r}: {error.message}") from error
            raise Interrupted(error.message) from error
        except InfrastructureError as error:
            certain.take(output, state, mixed=mixed_from == 0)
            raise Interrupted(error.message) from error
        if finish is None or not finish.spans or certain.of_adapter is not None:
            certain.take(output, state, mixed=mixed_from == 0)
        else:
            output.cut_off()
            state.take(output, finish.spans, mixed_from=mixed_from)
        if finish is not None and finish.kind == "abort" and certain.of_adapter is not None and certain.is_outdated:
            return output.cut is not None  # ended by a switch: goes on with the next version's adapter
        if finish is not None and output.cut is None and not state.aborted:
            judge(finish, output, state)
        return output.cut is not None

    @contextmanager
    def _suspecting(self, server: Server) -> Iterator[None]:
        """Suspect the server if it does not accept a request for long: a frozen server keeps the connection open."""

        async def suspect() -> None:
            while True:
                await asyncio.sleep(self._stall_timeout_s)
                self._fleet.suspect(server)

        suspecting = asyncio.ensure_future(suspect())
        try:
            yield
        finally:
            suspecting.cancel()

    async def _next(
        self, stream: TokenStream, state: RequestState, output: CallOutput, server: Server, rid: str
    ) -> Chunk | None:
        """The next chunk; None when an aborted call does not answer."""
        arriving = asyncio.ensure_future(stream.next())
        aborting = asyncio.ensure_future(state.abort_requested.wait())
        try:
            while True:
                ending = output.cut is not None or state.aborted
                if ending and not output.abort_sent:
                    self._fleet.ask(server, rid)
                    output.abort_sent = True
                waits = {arriving} if ending else {arriving, aborting}
                limit = ABORT_TIMEOUT_S if ending else self._stall_timeout_s
                done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if arriving in done:
                    return arriving.result()
                if ending:
                    return None
                if not done:
                    self._fleet.suspect(server)
        finally:
            aborting.cancel()
            if not arriving.done():
                arriving.cancel()

    def _accept(self, chunk: Chunk, output: CallOutput, state: RequestState) -> None:
        if output.cut is not None:
            return  # computed before the server received the abort
        if not all(map(math.isfinite, chunk.logprobs)):
            log.error("engine.not_finite", request=state.request.request_id, version=self._version)
            raise NotFinite(f"a log-probability is not finite under weight version {self._version}")
        taken = len(chunk.token_ids)
        if (watch := state.request.watch) is not None:
            # A request that ends for another reason does not get its last token here: the result has the token.
            watched = chunk.token_ids[:-1] if chunk.finish is not None else chunk.token_ids
            found = next((number for number, token in enumerate(watched, 1) if watch(token)), None)
            if found is not None:
                taken = found
                output.cut = len(output.tokens) + found
        output.tokens += chunk.token_ids[:taken]
        output.logprobs += chunk.logprobs[:taken]
        output.kept += chunk.kept[:taken]
        self._generated += taken
        if self._on_tokens is not None and taken:
            self._on_tokens(taken, time.time())

    # -- the rest -----------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise InfrastructureError(f"engine: {self._failure}")

    def _fail(self, reason: str) -> None:
        if self._failure is None or reason == "the engine is stopped":
            self._failure = reason
        self._admission.close(f"engine: {reason}")

    async def _settle(self) -> None:
        """Wait for tokens that were sampled before the pause."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        seen = -1
        while seen != self._generated and time.monotonic() < end:
            seen = self._generated
            await asyncio.sleep(SETTLE_S)
