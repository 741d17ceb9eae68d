"""The process: run directory -> journal -> recovered core -> server -> life of the run -> exit.

space on the disk, lock, open data, recover | serve, ready | live until the run ends or a signal | dismiss, drain, close
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog

from services.common import run_files
from services.common.aio import TaskOwner
from services.common.config.data import EVALUATION, is_training, name_of
from services.common.config.loading import load_resolved
from services.common.config.recipe import Recipe
from services.common.errors import ConfigError
from services.common.pb import pool_pb2_grpc, run_pb2_grpc, training_pb2_grpc
from services.common.prometheus import serve_metrics
from services.common.rpc.server import Server
from services.common.security import identity
from services.common.security.identity import check_keys_are_there
from services.common.system.machine import RESERVE_BYTES, GarbageSweeper
from services.common.system.threads import Watchdog
from services.common.telemetry import logs
from services.orchestrator import lifecycle
from services.orchestrator.config import RunLock, Settings
from services.orchestrator.journal import entries
from services.orchestrator.journal.journal import Journal
from services.orchestrator.journal.reader import JournalReader, Quarantine
from services.orchestrator.orchestrator import OrchestratorCore
from services.orchestrator.progress import METRICS, gauges, waits
from services.orchestrator.recovery import first_facts, recovered
from services.orchestrator.services.pool import PoolServicer
from services.orchestrator.services.run import RunServicer
from services.orchestrator.services.training import TrainingServicer
from services.orchestrator.tasks.datasets import open_source, requirement
from services.orchestrator.tasks.prompts import short_prompts, vocab_sizes
from services.orchestrator.tasks.rows import UsableRows
from services.orchestrator.trackers import TrackersProcess
from services.orchestrator.watch import Watch

# --- Waits for free disk space before the start: SQLite makes its own files before the first read.


log = structlog.get_logger()
LOOK_S = 0.5


async def wait_for_room(run_dir: Path) -> None:
    """Return when the run directory's disk has space to start.

    Has no deadline: an exit would only stop the run for good, even after space becomes free. The launcher reports the
    reason while the orchestrator does not answer.
    """
    told = False
    while (free := shutil.disk_usage(run_dir).free) < RESERVE_BYTES:
        if not told:
            log.error(
                "orchestrator.no_free_disk",
                free_bytes=free,
                place=str(run_dir),
                effect="the start waits for free space",
            )
        told = True
        await asyncio.sleep(LOOK_S)
    if told:
        log.info("orchestrator.room_again", place=str(run_dir))


MIN_FAREWELL_S = 1.0  # observers see the last state
MAX_FAREWELL_S = 10.0  # trainers and replicas leave by themselves after this
# The journal's thread and those that prepare large batches share the interpreter with the event loop; the default of 5 ms
# would hold up each step of an order on its way.
SWITCH_INTERVAL_S = 0.0005


async def main(settings: Settings) -> None:
    """Serve one run until its end or SIGTERM; raises UserError for unusable input."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
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
        run_files.journal(settings.run_dir),
        durability=recipe.orchestrator.durability,
        on_failure=fail,
    )
    sources = {
        where: open_source(
            config,
            recipe.data.seed_of(where, recipe.run.seed),
            requirement(recipe, where),
            evaluates=not is_training(where),
        )
        for where, config in recipe.data.sections().items()
    }
    for where, source in sources.items():
        left_out = source.left_out
        event = log.warning if left_out.count else log.info
        event("dataset.opened", dataset=where, rows=len(source), left_out=left_out.count, reasons=left_out.reasons)
    sources = short_prompts(sources, recipe, settings.run_dir)
    core = recovered(lambda aside: _core(settings.run_dir, recipe, journal, sources, aside), journal.reader)
    server = _server(core, recipe, settings, sources)
    await server.start()
    await serve_metrics(server, recipe.metrics, METRICS, name="orchestrator", run_dir=settings.run_dir)
    journal.start()
    trackers = TrackersProcess(recipe, settings.run_dir)
    watchdog = Watchdog()
    watchdog.start()
    async with TaskOwner() as tasks:
        try:
            tasks.start(Watch(core).run(), "watch")
            tasks.start(GarbageSweeper().run(), "collect garbage")
            server.set_ready()
            ending = tasks.start(_live_and_part(core), "lifecycle")
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
            core.metrics.close()
            await asyncio.to_thread(trackers.end)


def _server(core: OrchestratorCore, recipe: Recipe, settings: Settings, sources: Mapping[str, UsableRows]) -> Server:
    """The three services over the recovered core, before their start."""
    port = recipe.orchestrator.port if settings.port is None else settings.port
    server = Server(
        service="orchestrator",
        instance_id="orchestrator",
        host=recipe.orchestrator.host,
        port=port,
        run_id=recipe.run.id or "",
    )
    runs, pool, training = RunServicer(core), PoolServicer(core), TrainingServicer(core)
    counted_before = dict(core.counters)
    server.add(pool_pb2_grpc.add_PoolServiceServicer_to_server, pool, "rollmill.v1.PoolService")
    server.add(training_pb2_grpc.add_TrainingServiceServicer_to_server, training, "rollmill.v1.TrainingService")
    server.add(run_pb2_grpc.add_RunServiceServicer_to_server, runs, "rollmill.v1.RunService")
    server.set_gauges(
        lambda: gauges(core, sources, counted_before),
        lambda: {"state": core.control.state.value, "waits": "; ".join(waits(core))},
    )
    server.set_accounts(lambda: [core.account.state()])
    server.on_stop(pool.closing.set)
    server.on_stop(core.close)
    return server


def _stop_on_bug(context: dict[str, Any], fail: Callable[[BaseException], None]) -> None:
    """Stop the process after an exception in a callback, such as the dispatcher's, which has no caller.

    A restart is better than a run that stalls without a message.
    """
    error = context.get("exception")
    log.error("loop.exception", message=context["message"], exc_info=error)
    # grpc's poller raises BlockingIOError on a spurious wake-up, which is harmless.
    if error is not None and "handle" in context and not isinstance(error, BlockingIOError):
        fail(error)


async def _live_and_part(core: OrchestratorCore) -> None:
    await lifecycle.live(core)
    begin = time.monotonic()
    while (waited := time.monotonic() - begin) < MAX_FAREWELL_S:
        if core.all_left and waited >= MIN_FAREWELL_S:
            return
        await asyncio.sleep(0.1)


def _begun(reader: JournalReader) -> dict[str, Any] | None:
    """The contents of the first record; None in a new journal, and where the record is lost."""
    for row in reader.rows_of(entries.RUN):
        begun = reader.load(row)
        if begun is not None and begun.keys() >= {"run_id", "mark", "started_at"}:
            return begun
    return None


def _core(
    run_dir: Path,
    recipe: Recipe,
    journal: Journal,
    sources: Mapping[str, UsableRows],
    aside: Quarantine,
) -> OrchestratorCore:
    begun = _begun(journal.reader)
    if begun is None:
        mark, started_at = first_facts(journal.reader)
        begun = {"run_id": recipe.run.id, "mark": mark or secrets.token_hex(3), "started_at": started_at or time.time()}
        journal.submit(entries.RUN, "", begun)
    elif begun["run_id"] != recipe.run.id:
        raise ConfigError(
            f"the journal in {run_dir} belongs to run {begun['run_id']!r}, its recipe.json to {recipe.run.id!r}: "
            "give the new run a directory of its own"
        )
    return OrchestratorCore(
        recipe,
        run_dir,
        journal,
        training_sources={name_of(where): source for where, source in sources.items() if is_training(where)},
        evaluation_sources={name: sources[f"{EVALUATION}.{name}"] for name in recipe.data.evaluation},
        run_mark=begun["mark"],
        started_at=begun["started_at"],
        aside=aside,
        vocab_sizes=vocab_sizes(recipe, run_dir),
    )
