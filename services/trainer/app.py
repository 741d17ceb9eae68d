"""Wires the trainer of one policy: publisher, model, link to the orchestrator, loop.

settings from the orchestrator | publisher | model, checkpoint | join | recover, ready | train | export | part
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from services.common.config.policy import PolicyConfig
from services.common.errors import UnknownPolicyError
from services.common.logs import bind, configure
from services.common.memory import keep_freed_memory
from services.common.prometheus.serving import serve_metrics
from services.common.rpc.peer_watch import PeerWatch
from services.common.rpc.run_client import RunSettings, fetch_run
from services.common.rpc.server import Server
from services.common.watchdog import Watchdog
from services.trainer.config import Settings
from services.trainer.loop_thread import LoopThread
from services.trainer.orchestrator_client import OrchestratorClient
from services.trainer.prometheus import METRICS
from services.trainer.publisher_process import PublisherProcess

if TYPE_CHECKING:
    from services.trainer.sharding import Ranks
    from services.trainer.step import TrainStep

log = structlog.get_logger()

STATUS_GRACE_S = 1.0


def run_trainer(settings: Settings) -> None:
    """Run one rank until the orchestrator says stop, or SIGTERM.

    Raises ``MillraceError`` with what to do: an unreachable orchestrator, an unknown policy, another model's checkpoint.
    """
    keep_freed_memory()
    thread = LoopThread("trainer-grpc")
    watchdog = Watchdog()
    watchdog.start(thread.loop)
    run = thread.call(fetch_run(settings.orchestrator))
    policy = settings.policy
    if policy not in run.recipe.trained_policies:
        raise UnknownPolicyError(
            f"no policy {policy!r} in this run; --policy is one of {sorted(run.recipe.trained_policies)}"
        )
    run_dir = settings.run_dir or run.run_dir
    rank, num_ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    configure("trainer", run_dir, f"trainer-{policy}" + (f"-rank{rank}" if rank else ""))
    bind(run=run.run_id, policy=policy)
    # Before torch: the publisher comes up while it is imported.
    publisher = _publisher(run, settings, run_dir) if rank == 0 else None
    try:
        if publisher is not None:
            publisher.start()
        client = thread.call(_connect(settings.orchestrator, run.run_id, policy, num_ranks))
        server = thread.call(_serve(run, policy, run_dir, client)) if rank == 0 else None
        try:
            _train(run, policy, run_dir, client, thread, publisher, server)
            _leave_ranks()
        finally:
            thread.call(client.close())
            if server is not None:
                thread.call(server.stop(grace_s=STATUS_GRACE_S))
    finally:
        if publisher is not None:
            publisher.stop()
        watchdog.stop()
        thread.stop()


def _train(
    run: RunSettings,
    policy: str,
    run_dir: Path,
    client: OrchestratorClient,
    thread: LoopThread,
    publisher: PublisherProcess | None,
    server: Server | None,
) -> None:
    import torch

    from services.trainer.export import model_files
    from services.trainer.link import GrpcLink, rank_account
    from services.trainer.loop import TrainingLoop
    from services.trainer.peers import PeerLostError
    from services.trainer.setup import build_step, join_ranks, open_checkpoints
    from services.trainer.shared_directory import require_shared
    from services.trainer.snapshot import Snapshots
    from services.trainer.versions import SnapshotPublisher, snapshot_directories, sweep

    recipe = run.recipe
    config = recipe.policies[policy]
    ranks = join_ranks(recipe, policy)
    require_shared(run_dir / "checkpoints" / policy, ranks)
    directories = snapshot_directories(config.weights, run_dir)
    if ranks.is_first:
        sweep(directories)
    account = rank_account(policy, ranks.rank)
    client.report.accounts = lambda: [account.state()]
    if ranks.is_first:
        _watch_publisher(policy, client, thread, publisher)
    else:
        thread.loop.call_soon_threadsafe(client.report_as_rank, ranks.rank)
    step, tokenizer = build_step(recipe, policy, recipe.model_path(policy, run_dir), ranks)
    step.on_progress = account.beat
    files = model_files(step.model.causal_lm, tokenizer, config.weights.publish_dtype) if ranks.is_first else {}
    checkpoints = open_checkpoints(recipe, policy, run_dir, ranks, files)
    checkpoint_step = checkpoints.restore(step.model, step.optimizer)
    client.vocab_size = step.vocab_size
    newest_version = (
        thread.call(client.join(checkpoint_step, checkpoints.kept())).newest_version if ranks.is_first else -1
    )
    newest_version = int(ranks.max(torch.tensor(newest_version, device=ranks.device)))
    _leave_on_signal(client, thread)  # from here on every wait heeds it
    loop = TrainingLoop(
        step=step,
        link=GrpcLink(client, thread, ranks.rank, account),
        publisher=SnapshotPublisher(
            policy=policy,
            snapshots=Snapshots(
                step.model,
                ranks,
                run_id=run.run_id,
                policy=policy,
                dtype=config.weights.publish_dtype,
                algorithm=recipe.digest_algorithm(policy),
                directories=directories,
            ),
            process=publisher,
        ),
        checkpoints=checkpoints,
        ranks=ranks,
        num_steps=recipe.run.steps,
        checkpoint_every=config.trainer.checkpoint_every,
    )
    done = loop.recover(checkpoint_step, newest_version)
    if server is not None:
        thread.loop.call_soon_threadsafe(server.set_ready)
    done = loop.run(done)
    told_to_leave = bool(ranks.max(torch.tensor(int(client.commands.leave), device=ranks.device)))
    if told_to_leave and not client.commands.leave:
        raise PeerLostError("the ranks of another node were told to leave; a checkpoint is written")
    if config.trainer.export_final and not told_to_leave:
        client.report.state = "exporting"
        _export(step, tokenizer, run_dir / "export" / policy, ranks, config, checkpoints.path(done))
    loop.wait_for_stop(done)


def _watch_publisher(
    policy: str, client: OrchestratorClient, thread: LoopThread, publisher: PublisherProcess | None
) -> None:
    """Ask the publisher how it is, beside the training, and report it: replicas alone know only that they wait."""
    if publisher is None:
        return
    watch = PeerWatch(f"publisher/{policy}", lambda: publisher.address)
    client.report.peers = lambda: [state] if (state := watch.state()) is not None else []
    thread.loop.call_soon_threadsafe(lambda: client.start(watch.run(), "publisher watch"))


def _leave_ranks() -> None:
    from services.trainer.sharding import leave_ranks

    leave_ranks()


def _export(
    step: TrainStep, tokenizer: Any, directory: Path, ranks: Ranks, config: PolicyConfig, checkpoint: Path
) -> None:
    import torch

    from services.trainer.export import ExportFailedError, export_last

    dtype: torch.dtype = getattr(torch, config.weights.publish_dtype)
    try:
        export_last(step.model, tokenizer, directory, ranks, dtype, checkpoint)
    except ExportFailedError as error:  # the run need not fail for it
        log.error("export.failed", path=str(directory), error=error.message)


def _leave_on_signal(client: OrchestratorClient, thread: LoopThread) -> None:
    """SIGTERM and SIGINT: leave after the training step at hand, with a checkpoint."""

    def leave(number: int, frame: object) -> None:
        log.info("trainer.told_to_leave", signal=signal.Signals(number).name)
        thread.loop.call_soon_threadsafe(client.leave)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, leave)


def _publisher(run: RunSettings, settings: Settings, run_dir: Path) -> PublisherProcess:
    return PublisherProcess(
        run_id=run.run_id,
        policy=settings.policy,
        config=run.recipe.policies[settings.policy].weights,
        run_dir=run_dir,
        host=settings.host,
        metrics=run.recipe.metrics,
    )


async def _connect(address: str, run_id: str, policy: str, num_ranks: int) -> OrchestratorClient:
    return OrchestratorClient(address, run_id, policy, num_ranks)  # channels belong to the running loop


async def _serve(run: RunSettings, policy: str, run_dir: Path, client: OrchestratorClient) -> Server:
    server = Server(
        service="trainer",
        instance_id=f"trainer-{policy}",
        host="127.0.0.1",
        port=run.recipe.policies[policy].trainer.port,
        run_id=run.run_id,
    )
    report = client.report
    steps = ("training_step", "checkpoint_step")
    server.set_gauges(
        lambda: {**report.gauges, **{name: getattr(report, name) for name in steps}}, lambda: {"state": report.state}
    )
    server.set_accounts(lambda: report.accounts())
    await server.start()
    await serve_metrics(server, run.recipe.metrics, METRICS, name=f"trainer-{policy}", run_dir=run_dir)
    return server
