"""Wiring: run directory -> journal -> recovered ring -> server -> the run's life -> exit.

room on the disk, lock, open data, recover | serve, ready | live until the run ends or a signal | dismiss, drain, close
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from services.common import logs
from services.common.aio import TaskOwner
from services.common.config.data import EVALUATION, TRAIN
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.pb import pool_pb2_grpc, run_pb2_grpc, training_pb2_grpc
from services.common.prometheus.serving import serve_metrics
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.binding import check_keys_are_there
from services.common.watchdog import Watchdog
from services.orchestrator import lifecycle
from services.orchestrator.config import Settings
from services.orchestrator.datasets import TaskSource, log_opened, open_source
from services.orchestrator.gauges import gauges
from services.orchestrator.journal import records
from services.orchestrator.journal.reader import JournalReader
from services.orchestrator.journal.writer import Journal
from services.orchestrator.lock import RunLock
from services.orchestrator.progress import waits
from services.orchestrator.prometheus import METRICS
from services.orchestrator.prompt_length import short_prompts
from services.orchestrator.recovery import recovered
from services.orchestrator.requirements import requirement
from services.orchestrator.ring import Ring
from services.orchestrator.room import wait_for_room
from services.orchestrator.servicer_pool import PoolServicer
from services.orchestrator.servicer_run import RunServicer
from services.orchestrator.servicer_training import TrainingServicer
from services.orchestrator.survey import first_facts
from services.orchestrator.vocabulary import vocab_sizes
from services.orchestrator.watch import Watch

log = structlog.get_logger()

MIN_FAREWELL_S = 1.0  # people who watch see the last state
MAX_FAREWELL_S = 10.0  # trainers and replicas leave by themselves after this


async def main(settings: Settings) -> None:
    """Serve one run until it has ended, or SIGTERM; raises UserError for what cannot be used."""
    recipe = load_resolved(settings.run_dir)
    check_keys_are_there(recipe.needs_keys, identity.current())
    await wait_for_room(settings.run_dir)
    with RunLock(settings.lock_file):
        logs.configure("orchestrator", settings.run_dir)
        logs.bind(run=recipe.run.id)
        await _serve(settings, recipe)


async def _serve(settings: Settings, recipe: Recipe) -> None:
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def fail(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    asyncio.get_running_loop().set_exception_handler(lambda loop, context: _stop_on_bug(context, fail))
    journal = Journal(
        settings.journal_dir,
        segment_bytes=recipe.orchestrator.segment_bytes,
        durability=recipe.orchestrator.durability,
        on_failure=fail,
    )
    reader = JournalReader(settings.journal_dir)
    sources = {
        where: open_source(config, recipe.data.seed_of(where, recipe.run.seed), requirement(recipe, where))
        for where, config in recipe.data.sections().items()
    }
    for where, source in sources.items():
        log_opened(where, source)
    sources = short_prompts(sources, recipe, settings.run_dir)
    ring = recovered(lambda: _ring(settings.run_dir, recipe, journal, reader, sources), reader)
    reader.close()
    server = _server(ring, recipe, settings, sources)
    await server.start()
    await serve_metrics(server, recipe.metrics, METRICS, name="orchestrator", run_dir=settings.run_dir)
    journal.start()
    watchdog = Watchdog()
    watchdog.start()
    async with TaskOwner() as tasks:
        try:
            tasks.start(Watch(ring).run(), "watch")
            server.set_ready()
            ending = tasks.start(_live_and_part(ring), "lifecycle")
            stopping = tasks.start(server.wait_for_stop(), "signals")
            broken = tasks.start(tasks.failed(), "failures")
            await asyncio.wait({ending, stopping, broken, failed}, return_when=asyncio.FIRST_COMPLETED)
            if failed.done():
                failed.result()
            for task in (ending, broken):
                if task.done():
                    task.result()
        finally:
            watchdog.stop()
            failed.cancel()
            await server.stop()
            await journal.close()
            ring.metrics.close()


def _server(ring: Ring, recipe: Recipe, settings: Settings, sources: Mapping[str, TaskSource]) -> Server:
    """The three services over the recovered ring, not started yet."""
    counted_before = dict(ring.counters)
    port = recipe.orchestrator.port if settings.port is None else settings.port
    server = Server(
        service="orchestrator", instance_id="orchestrator", host=recipe.orchestrator.host, port=port, run_id=ring.run_id
    )
    runs = RunServicer(ring)
    pool = PoolServicer(ring)
    server.add(pool_pb2_grpc.add_PoolServiceServicer_to_server, pool, "millrace.v1.PoolService")
    server.add(
        training_pb2_grpc.add_TrainingServiceServicer_to_server, TrainingServicer(ring), "millrace.v1.TrainingService"
    )
    server.add(run_pb2_grpc.add_RunServiceServicer_to_server, runs, "millrace.v1.RunService")
    server.set_gauges(
        lambda: gauges(ring, sources, counted_before),
        lambda: {"state": ring.control.state.value, "waits": "; ".join(waits(ring))},
    )
    server.set_accounts(lambda: [ring.standing.account.state()])
    server.on_stop(runs.closing.set)
    server.on_stop(pool.closing.set)
    server.on_stop(ring.close)
    return server


def _stop_on_bug(context: dict[str, Any], fail: Callable[[BaseException], None]) -> None:
    """An exception in a callback, such as the dispatcher's, has no caller to tell: the process stops and can be started
    again, which is better than a run that silently stands still."""
    error = context.get("exception")
    log.error("loop.exception", message=context["message"], exc_info=error)
    # grpc's poller raises BlockingIOError on a spurious wake-up, which is harmless.
    if error is not None and "handle" in context and not isinstance(error, BlockingIOError):
        fail(error)


async def _live_and_part(ring: Ring) -> None:
    await lifecycle.live(ring)
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < MAX_FAREWELL_S:
        gone = all(r.mailbox is None for r in ring.pool) and all(t.mailbox is None for t in ring.trainers)
        if gone and waited >= MIN_FAREWELL_S:
            return
        await asyncio.sleep(0.1)


def _begun(reader: JournalReader) -> dict[str, Any] | None:
    """What the first record says; None in a new journal, and where it is lost."""
    for row in reader.rows_of(records.RUN):
        begun = reader.load(row)
        if begun is not None and begun.keys() >= {"run_id", "mark", "started_at"}:
            return begun
    return None


def _ring(
    run_dir: Path, recipe: Recipe, journal: Journal, reader: JournalReader, sources: Mapping[str, TaskSource]
) -> Ring:
    begun = _begun(reader)
    if begun is None:
        mark, started_at = first_facts(reader)
        begun = {"run_id": recipe.run.id, "mark": mark or secrets.token_hex(3), "started_at": started_at or time.time()}
        record = begun
        journal.submit(records.RUN, "", lambda: record)
    elif begun["run_id"] != recipe.run.id:
        raise ConfigError(
            f"the journal in {run_dir} belongs to run {begun['run_id']!r}, its recipe.json to {recipe.run.id!r}: "
            "give the new run a directory of its own"
        )
    return Ring(
        recipe,
        run_dir,
        journal,
        training_source=sources[TRAIN],
        evaluation_sources={name: sources[f"{EVALUATION}.{name}"] for name in recipe.data.evaluation},
        run_mark=begun["mark"],
        started_at=begun["started_at"],
        vocab_sizes=vocab_sizes(recipe, run_dir),
    )
