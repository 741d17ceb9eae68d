"""The production engine: servers as child processes, several for one policy, called over HTTP.

    generate -> calls of servers, the least loaded or that of the rollout -> segments by the servers' own version spans
    update   -> stage -> every server: pause, read, flush, go on
    a server dies -> its requests go on elsewhere with their tokens; the server is restarted

All code runs in the event loop that calls ``start``, which must be the main thread's: the servers end with that thread.
Seeds are not passed on: requests that run together change a server's arithmetic, so equal seeds do not give equal samples.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import structlog

from services.common.aio import backoff
from services.common.config.processes import LOADED_BYTES_PER_S, MASK_TOKENS, SERVER_START_S, InferenceConfig
from services.common.errors import ConfigError, InfrastructureError, InvalidRequestError
from services.common.kept_tokens import KeptRow
from services.common.records import Logprobs
from services.common.telemetry.logs import LogEvent
from services.common.weights.snapshot import AdapterIdentity
from services.inference.engine.base import (
    EngineHealth,
    FinishReason,
    Generation,
    GenerationRequest,
    KvPolicy,
    Mark,
    ScoreRequest,
    WeightUpdate,
    check_request,
    check_update,
    segments_by,
)
from services.inference.engine.served.client import CallRequest, Chunk, Finish, Refused, TokenStream, VersionSpan
from services.inference.engine.served.fleet import Fleet, Server, Transfer
from services.inference.engine.served.process import (
    Program,
    ServerCommand,
    ServerProcess,
    interpreter,
    runs_on_cpu,
    seen_device,
)
from services.inference.engine.served.stage import Stage, place_stage, size_of

# --- State of one request: its tokens so far by weight version, and its remaining budget.


@dataclass(slots=True, eq=False)
class RequestState:
    """The state of one request. ``room``: the tokens that the context has left after the prompt."""

    request: GenerationRequest
    room: int
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)  # of the first tokens only
    marks: list[Mark] = field(default_factory=list)

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return min(self.request.sampling.max_new_tokens, self.room) - len(self.tokens)

    @property
    def sequence(self) -> tuple[int, ...]:
        """The prompt and the tokens so far."""
        return (*self.request.prompt_ids, *self.tokens)

    def ended(self) -> FinishReason | None:
        """The reason if the request is complete, else None."""
        if self.tokens and self.tokens[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.remaining <= 0 else None

    def next_call(self, chunk_tokens: int, adapter: str = "") -> CallRequest:
        """The next call of a server, with the adapter of this name. No id is a prefix of another: SGLang aborts all requests whose ids have the prefix."""
        num_suppressed = self.request.sampling.min_new_tokens - len(self.tokens)
        suppress = num_suppressed > 0 and bool(self.request.stop_token_ids)
        return CallRequest(
            rid=uuid.uuid4().hex,
            input_ids=self.sequence,
            max_new_tokens=min(self.remaining, num_suppressed) if suppress else self.remaining,
            sampling=self.request.sampling,
            stop_token_ids=self.request.stop_token_ids,
            suppress_stop=suppress,
            chunk_tokens=1 if self.request.watch is not None else chunk_tokens,
            adapter=adapter,
        )

    def take(self, output: CallOutput, spans: tuple[VersionSpan, ...], *, mixed_from: int | None) -> None:
        """Add a call's tokens. ``mixed_from``: the first span that was computed on an older version's cache.

        Raises ``InfrastructureError`` if the spans do not name the version of each token.
        """
        start = 0
        offset = len(self.tokens)
        num_tokens = len(output.tokens)
        marks: list[Mark] = []
        for number, span in enumerate(spans):
            end = min(span.end, num_tokens)
            if span.start != start or span.end < span.start:
                break
            if end > start:
                mixed = mixed_from is not None and number >= mixed_from
                mark = (offset + start, span.version, mixed)
                last = [*self.marks, *marks][-1:]
                if not last or last[0][1:] != mark[1:]:
                    marks.append(mark)
            start = span.end
        if start < num_tokens:
            raise InfrastructureError(f"the server does not say which weights computed {num_tokens} tokens: {spans}")
        self.tokens += output.tokens
        self.logprobs += output.logprobs
        self.kept += output.kept
        self.marks += marks

    def generation(self, reason: FinishReason) -> Generation:
        kept = self.kept if self.request.record_kept else ()
        return Generation(segments=segments_by(self.marks, self.tokens, self.logprobs, kept), finish_reason=reason)


@dataclass(slots=True)
class CallOutput:
    """The tokens so far of one server call."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept: list[KeptRow] = field(default_factory=list)  # empty where the sampling is not cut
    cut: int | None = None  # tokens after which ``watch`` has ended the call
    abort_sent: bool = False  # whether the server has an abort

    def cut_off(self) -> None:
        """Drop the tokens after the cut."""
        if self.cut is not None:
            self.keep_first(self.cut)

    def keep_first(self, num_tokens: int) -> None:
        """Drop the tokens after the first ``num_tokens``."""
        for column in (self.tokens, self.logprobs, self.kept):
            del column[num_tokens:]


class Interrupted(Exception):
    """A server call that broke without a fault of the request."""


class NotFinite(InfrastructureError):
    """A failure that a retry under the same weights would repeat."""


class CertainTokens:
    """The tokens to keep of a broken call, whose server did not report the versions of the tokens.

    All tokens that came before the server's next switch were computed with its settled version.
    """

    def __init__(self, server: Server) -> None:
        self._server = server
        self._switches = server.switches
        # A call with an adapter has its version to the end.
        self._is_fixed = bool(server.adapter)
        self._version = server.version if self._is_fixed else server.settled_version
        self._certain: int | None = None if self._version is not None else 0

    @property
    def of_adapter(self) -> int | None:
        """The version of all tokens of a call with an adapter; None for another call."""
        return self._version if self._is_fixed else None

    @property
    def is_outdated(self) -> bool:
        """Whether the server has switched since the call's begin."""
        return self._server.switches != self._switches

    def note(self, num_tokens: int) -> None:
        """Note the number of tokens before the current chunk."""
        if self._certain is None and not self._is_fixed and self.is_outdated:
            self._certain = num_tokens

    def take(self, output: CallOutput, state: RequestState, *, mixed: bool) -> None:
        """Keep these tokens. ``InfrastructureError`` if a watch has seen tokens beyond them."""
        output.cut_off()
        if self._certain is not None:
            if output.cut is not None and self._certain < output.cut:
                raise InfrastructureError(
                    "the server did not report the weight version of tokens that were already watched"
                )
            output.keep_first(self._certain)
        if output.tokens:
            assert self._version is not None
            span = VersionSpan(version=self._version, start=0, end=len(output.tokens))
            state.take(output, (span,), mixed_from=0 if mixed else None)


def judge(finish: Finish, output: CallOutput, state: RequestState) -> None:
    """Judge a completed call: returns if the tokens count, else raises ``Interrupted`` (another call is needed) or an error."""
    if finish.kind == "abort":
        if finish.status is not None and 400 <= finish.status < 500:
            raise InvalidRequestError(
                f"request {state.request.request_id!r}: the server refuses the request: {finish.message}"
            )
        raise Interrupted(finish.message or "the server ended the call")
    if not output.tokens:
        raise InfrastructureError(
            f"request {state.request.request_id!r}: no room for another token after {len(state.sequence)}: the KV cache "
            "of the server is smaller than policies.<name>.model.context_length; give the server more memory"
        )


log = structlog.get_logger(__name__)
T = TypeVar("T")
RESTARTS = 5  # in a row, of a server that dies without having served
STALL_TIMEOUT_S = (
    300.0  # without a token of a request; then its server is asked for one, and started again if none comes
)
# Of a request that nobody watches: they come together, and a continuation may lose so many when a server dies.
CHUNK_TOKENS = 16
ABORT_TIMEOUT_S = 3.0  # for a server to end an aborted call; then the tokens so far are taken
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
        restarts: int = RESTARTS,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        chunk_tokens: int = CHUNK_TOKENS,
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
        self._fleet = Fleet(servers, stage, transfer, restarts=restarts)
        self._request_ids: set[str] = set()
        self._version = stage.version
        self._generated = 0

    # -- the protocol -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Return when every server serves; ``InfrastructureError`` or ``DeadlineError`` with a server's last output."""
        await self._fleet.start()

    async def generate(self, request: GenerationRequest) -> Generation:
        self._fleet.check_alive()
        if request.request_id in self._request_ids:
            raise InvalidRequestError(f"request {request.request_id!r} is already being generated")
        check_request(request, context_length=self._context_length, vocab_size=self._vocab_size)
        if request.sampling.top_k > MASK_TOKENS:
            raise InvalidRequestError(
                f"request {request.request_id!r}: top_k is {request.sampling.top_k}; {self._program.name} tells of at most "
                f"{MASK_TOKENS} tokens which could be drawn: write fewer, or 0 (off)"
            )
        state = RequestState(request, self._context_length - len(request.prompt_ids))
        self._request_ids.add(request.request_id)
        try:
            return await self._play(state)
        finally:
            self._request_ids.remove(request.request_id)

    async def score(self, request: ScoreRequest) -> Logprobs:
        raise ConfigError(
            f"the {self._program.section} engine cannot score tokens for distillation: name the teacher's model in "
            "algorithm.distillation.teacher_model, or write engine: torch"
        )

    async def update(self, update: WeightUpdate) -> float:
        self._fleet.check_alive()
        check_update(update, self._stage.shapes)
        seconds = await self._fleet.switch(update)
        self._version = update.version
        log.info(
            LogEvent.ENGINE_UPDATED, version=update.version, live=len(self._request_ids), seconds=round(seconds, 4)
        )
        return seconds

    @property
    def version(self) -> int:
        return self._version

    def health(self) -> EngineHealth:
        num_serving = sum(server.serving for server in self.servers)
        running = sum(server.in_flight for server in self.servers)
        state = "running"
        if num_serving < len(self.servers):
            state = f"{num_serving} of {len(self.servers)} {self._program.name} servers are running"
        return EngineHealth(
            ok=not self._fleet.failure,
            detail=self._fleet.failure or state,
            running=running,
            waiting=len(self._request_ids) - running,
            generated_tokens=self._generated,
        )

    async def stop(self) -> None:
        await self._fleet.stop()
        self._stage.remove()

    # -- the life of a request ----------------------------------------------------------------------------------

    async def _play(self, state: RequestState) -> Generation:
        interruptions, delays = 0, backoff(0.2)
        while (reason := state.ended()) is None:
            server = await self._fleet.server_for(state.request.request_id)
            server.in_flight += 1
            try:
                ended_here = await self._run_call(state, server)
            except Interrupted as interrupted:
                interruptions += 1
                self._fleet.check_alive()
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
                server.in_flight -= 1
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
                entering = leaving.enter_async_context(server.client.generate(request))
                stream = await self._patiently(entering, server)
                while finish is None:
                    chunk = await self._next(stream, output, server, request.rid)
                    if chunk is None:
                        break
                    certain.note(len(output.tokens))
                    if stale and chunk.cached_tokens:
                        mixed_from = 0
                    finish = chunk.finish
                    self._accept(chunk, output, state)
        except (asyncio.CancelledError, NotFinite):
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
        if finish is not None and output.cut is None:
            judge(finish, output, state)
        return output.cut is not None

    async def _next(self, stream: TokenStream, output: CallOutput, server: Server, rid: str) -> Chunk | None:
        """The next chunk; None when a call that ``watch`` has ended does not answer."""
        if output.cut is None:
            return await self._patiently(stream.next(), server)
        if not output.abort_sent:
            self._fleet.ask(server, rid)
            output.abort_sent = True
        try:
            async with asyncio.timeout(ABORT_TIMEOUT_S):
                return await stream.next()
        except TimeoutError:
            return None

    async def _patiently(self, work: Coroutine[Any, Any, T], server: Server) -> T:
        """Wait for a server, and suspect it after every ``stall_timeout_s``: a frozen one keeps its connections open."""
        arriving = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({arriving}, timeout=self._stall_timeout_s))[0]:
                self._fleet.suspect(server)
            return arriving.result()
        finally:
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


# --- Builds an engine over servers: stage, processes, fleet. A program's ``build`` gives the commands and the transfer.


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedSetup:
    """The input of every engine over servers, the same for SGLang and vLLM."""

    config: InferenceConfig
    name: str
    """In the names of logs and of the stage."""
    model_path: str
    """The base model where there is an ``adapter``."""
    context_length: int
    tensors: Mapping[str, Any]
    """Host tensors of version 0 by Hugging Face name, in the published type; those of the adapter if there is one."""
    directory: Path
    """Logs are in its folder ``logs``."""
    number: int = 1
    """Servers that share the load."""
    gpus: Sequence[str] = ()
    """GPUs of these servers alone; empty for all visible GPUs."""
    on_tokens: Callable[[int, float], None] | None = None
    adapter: AdapterIdentity | None = None


def commands_of(
    setup: ServedSetup,
    words: Sequence[str],
    program: Callable[[Sequence[str]], Program],
    env: Mapping[str, str],
    environment: Mapping[str, str],
) -> list[ServerCommand]:
    """Commands of the data-parallel servers of one policy: ``words`` after the interpreter, with ``env``.

    ``program`` is given the devices of a server's ranks, in torch's notation, as this process sees them.
    Raises ``ConfigError`` for fewer GPUs than the servers need.
    """
    config, settings = setup.config, setup.config.servers
    assert settings is not None
    on_cpu, parallel, needed = runs_on_cpu(config), settings.tensor_parallel, setup.number * settings.tensor_parallel
    if setup.gpus and len(setup.gpus) < needed:
        raise ConfigError(
            f"{setup.number} {config.engine} engines of {parallel} GPUs need {needed}, but have {len(setup.gpus)}"
        )
    python = interpreter(config.engine, settings.python, environment, on_cpu=on_cpu)
    env = {**env, "TOKENIZERS_PARALLELISM": "false"}
    if Path(setup.model_path).is_dir():
        env["HF_HUB_OFFLINE"] = "1"
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    per_rank = min(config.threads, len(cores))
    commands = []
    for index in range(setup.number):
        ranks, own = range(index * parallel, (index + 1) * parallel), dict(env)
        gpus = [setup.gpus[rank] for rank in ranks] if setup.gpus else []
        devices = ["cpu"] * parallel if on_cpu else [seen_device(gpu, environment) for gpu in gpus or ranks]
        if gpus:
            own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
        if on_cpu:  # SGLang and vLLM want threads and cores named, and they must exist
            bound = [sorted(cores[(rank * per_rank + i) % len(cores)] for i in range(per_rank)) for rank in ranks]
            own["OMP_NUM_THREADS"] = str(config.threads)
            own[f"{config.engine.upper()}_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, of)) for of in bound)
        name = f"{config.engine}-{setup.name}-{index}"
        commands.append(ServerCommand(name=name, argv=(python, *words), program=program(devices), env=own))
    return commands


def engine_of(
    setup: ServedSetup, commands: Sequence[ServerCommand], transfer: Callable[[Stage], Transfer]
) -> ServedEngine:
    """An engine over the servers of ``commands``. Starts no process.

    Raises ``ConfigError`` if no place has room for the stage.
    """
    config, directory = setup.config, setup.directory
    settings = config.servers
    assert settings is not None
    size_bytes = size_of(setup.tensors)
    place = place_stage(directory / "stage", setup.name, size_bytes)
    stage = Stage(place, setup.tensors, 0)
    kv_policy = KvPolicy(config.kv_policy)
    ready_s = SERVER_START_S + size_bytes / LOADED_BYTES_PER_S
    logs = directory / "logs"
    servers = [Server(ServerProcess(command, logs / f"{command.name}.log", ready_s), kv_policy) for command in commands]
    return ServedEngine(
        servers,
        stage,
        transfer(stage),
        context_length=setup.context_length,
        vocab_size=read_model_config(setup.model_path).get("vocab_size"),
        kv_policy=kv_policy,
        on_tokens=setup.on_tokens,
    )


def read_model_config(model_path: str) -> Mapping[str, Any]:
    """The part of a model's ``config.json`` that describes its text; empty if the file is not on this disk.

    ``ConfigError`` for a directory without a readable file.
    """
    path = Path(model_path)
    if not path.is_absolute() and not path.is_dir():
        return {}
    try:
        read = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{model_path}: no model that can be read there: {error}") from error
    return {**read.get("text_config", {}), **read}
