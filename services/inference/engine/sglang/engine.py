"""The production engine: SGLang servers as child processes, several for one policy, spoken to over HTTP.

    generate -> admission (a server with room) -> legs at servers -> segments by the servers' own version spans
    update   -> stage -> every server: pause, read, flush, go on
    a server dies -> its requests go on elsewhere with what they have; it is started anew

Everything runs in the event loop that calls ``start``; it must be the main thread's, with which the servers end. Seeds
are not passed on: SGLang's do not repeat, so equal seeds do not give equal samples here.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager

import structlog

from services.common.aio import backoff
from services.common.config.sglang import MASK_TOKENS
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError
from services.common.types import Logprobs
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    KvPolicy,
    ScoreRequest,
)
from services.inference.engine.requests import check_request
from services.inference.engine.sglang.admission import Admission
from services.inference.engine.sglang.client import Refused, TokenStream
from services.inference.engine.sglang.ending import Before, Interrupted, NotFinite, judge
from services.inference.engine.sglang.fleet import Fleet
from services.inference.engine.sglang.legs import Chunk, Finish
from services.inference.engine.sglang.playing import Leg, Playing
from services.inference.engine.sglang.server import Server
from services.inference.engine.sglang.stage import Stage
from services.inference.engine.sglang.transfer import Transfer
from services.inference.engine.weight_update import WeightUpdate, check_update

log = structlog.get_logger(__name__)

ABORT_TIMEOUT_S = 3.0  # for a server to end a leg that it was told to end; then what has come is taken
SETTLE_S = 0.02  # of silence, after which tokens that were on their way have arrived
SETTLE_TIMEOUT_S = 2.0
_MAX_INTERRUPTIONS = 5  # of one request, by servers that die or refuse


class SglangEngine:
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
        self._servers = servers
        self._stage = stage
        self._context_length = context_length
        self._vocab_size = vocab_size
        self._kv_policy = kv_policy
        self._stall_timeout_s = stall_timeout_s
        self._chunk_tokens = chunk_tokens
        self._on_tokens = on_tokens
        self._admission = Admission(servers)
        self._fleet = Fleet(
            servers,
            stage,
            transfer,
            restarts=restarts,
            changed=self._admission.dispatch,
            lost=self._admission.forget,
            failed=self._fail,
        )
        self._by_id: dict[str, Playing] = {}
        self._version = stage.version
        self._generated = 0
        self._failure: str | None = "the engine is not started"

    # -- the protocol -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when every server serves; ``InfrastructureError`` or ``DeadlineError`` with a server's last words."""
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
                f"request {request.request_id!r}: top_k is {request.sampling.top_k}; SGLang tells of at most "
                f"{MASK_TOKENS} tokens which could be drawn: write fewer, or 0 (off)"
            )
        playing = Playing(request, self._context_length - len(request.prompt_ids))
        self._by_id[request.request_id] = playing
        try:
            return await self._play(playing)
        finally:
            del self._by_id[request.request_id]

    async def score(self, request: ScoreRequest) -> Logprobs:
        raise ConfigError(
            "the sglang engine cannot score tokens for distillation: name the teacher's model in "
            "algorithm.distillation.teacher_model, or write engine: torch"
        )

    async def abort(self, request_id: str) -> None:
        if (playing := self._by_id.get(request_id)) is not None:
            playing.abort()

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
        log.info("engine.updated", version=update.version, live=len(self._by_id), seconds=round(seconds, 4))
        return seconds

    async def flush(self) -> None:
        await self._fleet.flush()

    @property
    def version(self) -> int:
        return self._version

    def health(self) -> EngineHealth:
        serving = [server for server in self._servers if server.serving]
        running = sum(server.in_flight for server in self._servers)
        state = "paused" if self._fleet.paused else "running"
        if len(serving) < len(self._servers):
            state = f"{len(serving)} of {len(self._servers)} SGLang servers are running"
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

    async def _play(self, playing: Playing) -> Generation:
        interruptions, delays = 0, backoff(0.2)
        while (reason := playing.ended()) is None:
            server = await self._admission.enter(playing)
            if server is None:
                continue  # it was told to end
            try:
                ended_here = not playing.aborted and await self._play_leg(playing, server)
            except Interrupted as interrupted:
                interruptions += 1
                self._check_alive()
                if interruptions >= _MAX_INTERRUPTIONS:
                    raise InfrastructureError(
                        f"request {playing.request.request_id!r} was interrupted {interruptions} times, last: {interrupted}"
                    ) from interrupted
                log.warning(
                    "sglang.interrupted",
                    request=playing.request.request_id,
                    server=server.name,
                    kept_tokens=len(playing.tokens),
                    error=str(interrupted),
                )
                await asyncio.sleep(next(delays))
                continue
            finally:
                self._admission.leave(server)
            if ended_here:
                return playing.generation(FinishReason.STOP)
        return playing.generation(reason)

    async def _play_leg(self, playing: Playing, server: Server) -> bool:
        """Let a server go on with a request. True when somebody who watches has ended it.

        ``Interrupted``: it could not be brought to an end there; what is certain of it was taken.
        """
        request = playing.next_leg(self._chunk_tokens)
        leg, before = Leg(), Before(server)
        mixed_from: int | None = 1 if self._kv_policy is KvPolicy.KEEP else None
        stale = server.stale_prefixes
        finish: Finish | None = None
        try:
            async with AsyncExitStack() as leaving:
                with self._suspecting(server):
                    stream = await leaving.enter_async_context(server.client.generate(request))
                while finish is None:
                    chunk = await self._next(stream, playing, leg, server, request.rid)
                    if chunk is None:
                        break
                    before.note(len(leg.tokens))
                    if stale and chunk.cached_tokens:
                        mixed_from = 0
                    finish = chunk.finish
                    self._accept(chunk, leg, playing)
        except asyncio.CancelledError:
            self._fleet.ask(server, request.rid)
            raise
        except NotFinite:
            self._fleet.ask(server, request.rid)
            raise
        except Refused as error:
            if 400 <= error.status < 500:
                raise InvalidRequestError(f"request {playing.request.request_id!r}: {error.message}") from error
            raise Interrupted(error.message) from error
        except InfrastructureError as error:
            before.take(leg, playing, mixed=mixed_from == 0)
            raise Interrupted(error.message) from error
        if finish is None or not finish.spans:
            before.take(leg, playing, mixed=mixed_from == 0)
        else:
            leg.cut_off()
            playing.take(leg, finish.spans, mixed_from=mixed_from)
        if finish is not None and leg.cut is None and not playing.aborted:
            judge(finish, leg, playing)
        return leg.cut is not None

    @contextmanager
    def _suspecting(self, server: Server) -> Iterator[None]:
        """For the wait until a server has taken a request: one that is frozen never does, and its connection stands."""

        async def suspect() -> None:
            while True:
                await asyncio.sleep(self._stall_timeout_s)
                self._fleet.suspect(server)

        suspecting = asyncio.ensure_future(suspect())
        try:
            yield
        finally:
            suspecting.cancel()

    async def _next(self, stream: TokenStream, playing: Playing, leg: Leg, server: Server, rid: str) -> Chunk | None:
        """The next chunk; None when a leg that was told to end does not answer."""
        arriving = asyncio.ensure_future(stream.next())
        told = asyncio.ensure_future(playing.told_to_end.wait())
        try:
            while True:
                ending = leg.cut is not None or playing.aborted
                if ending and not leg.told:
                    self._fleet.ask(server, rid)
                    leg.told = True
                waits = {arriving} if ending else {arriving, told}
                limit = ABORT_TIMEOUT_S if ending else self._stall_timeout_s
                done, _ = await asyncio.wait(waits, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
                if arriving in done:
                    return arriving.result()
                if ending:
                    return None
                if not done:
                    self._fleet.suspect(server)
        finally:
            told.cancel()
            if not arriving.done():
                arriving.cancel()

    def _accept(self, chunk: Chunk, leg: Leg, playing: Playing) -> None:
        if leg.cut is not None:
            return  # computed before the server heard of the end
        if not all(map(math.isfinite, chunk.logprobs)):
            log.error("engine.not_finite", request=playing.request.request_id, version=self._version)
            raise NotFinite(f"a log-probability is not finite under weight version {self._version}")
        taken = len(chunk.token_ids)
        if (watch := playing.request.watch) is not None:
            # What ends for another reason is not told its last token: the result has it.
            told = chunk.token_ids[:-1] if chunk.finish is not None else chunk.token_ids
            found = next((number for number, token in enumerate(told, 1) if watch(token)), None)
            if found is not None:
                taken = found
                leg.cut = len(leg.tokens) + found
        leg.tokens += chunk.token_ids[:taken]
        leg.logprobs += chunk.logprobs[:taken]
        leg.kept += chunk.kept[:taken]
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
        """Tokens sampled before the pause may still be on their way."""
        end = time.monotonic() + SETTLE_TIMEOUT_S
        seen = -1
        while seen != self._generated and time.monotonic() < end:
            seen = self._generated
            await asyncio.sleep(SETTLE_S)
