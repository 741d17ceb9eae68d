"""Wires the trainer of one policy: publisher, model, link to the orchestrator, loop.

settings from the orchestrator | publisher | model, checkpoint | join | recover, ready | train | export | part
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from services.common import checkpoints as names
from services.common import run_files
from services.common.config.processes.placement import Placement
from services.common.config.training.policy import PolicyConfig
from services.common.errors import UnknownPolicyError
from services.common.prometheus import serve_metrics
from services.common.rpc.client.peer_watch import PeerWatch
from services.common.rpc.client.run_client import RunSettings, fetch_run
from services.common.rpc.server import Server
from services.common.system.memory import keep_freed_memory
from services.common.system.threads import Watchdog
from services.common.telemetry.activities import TrainerState
from services.common.telemetry.components import publisher as publisher_of
from services.common.telemetry.logs import bind, configure
from services.trainer.config import Settings
from services.trainer.loop.grpc_link import GrpcLink, LoopThread, rank_account
from services.trainer.loop.orchestrator_client import OrchestratorClient
from services.trainer.prometheus import METRICS
from services.trainer.publisher_process import PublisherProcess

if TYPE_CHECKING:
    from services.trainer.publish import SnapshotPublisher
    from services.trainer.ranks.sharding import Ranks
    from services.trainer.step.train_step import TrainStep

log = structlog.get_logger()

STATUS_GRACE_S = 1.0


def run_trainer(settings: Settings) -> None:
    """Run one rank until the orchestrator stops the run or SIGTERM arrives.

    Raises ``RollmillError``, which names the fix: an unreachable orchestrator, an unknown policy, a checkpoint of
    another model.
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
    # Before torch: the publisher starts while torch is imported.
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

    from services.trainer.checkpoints import checkpoint_files, require_shared
    from services.trainer.loop.device_turns import DeviceTurns
    from services.trainer.loop.training_loop import TrainingLoop
    from services.trainer.publish import snapshot_directories, sweep
    from services.trainer.ranks.leaving import LeaveOnSignal
    from services.trainer.ranks.sharding import PeerLostError
    from services.trainer.setup import build_step, join_ranks, numerics_gate, open_checkpoints

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
    shared = recipe.placement is Placement.SHARED
    turn = _first_turn(client, thread, run_dir, policy, ranks) if shared else 0
    step, tokenizer = build_step(recipe, policy, recipe.model_path(policy, run_dir), ranks)
    step.on_progress = account.beat
    files = checkpoint_files(step.model, tokenizer, config.published_dtype) if ranks.is_first else {}
    checkpoints = open_checkpoints(recipe, policy, run_dir, ranks, files)
    checkpoint_step = checkpoints.restore(step.model, step.optimizer)
    client.vocab_size = step.vocab_size
    newest_version = -1
    if ranks.is_first:
        newest_version = thread.call(client.join(checkpoint_step, checkpoints.kept())).newest_version
    newest_version = int(ranks.max(torch.tensor(newest_version, device=ranks.device)))
    # From here on a signal ends every wait, and the rank leaves after the current training step.
    LeaveOnSignal(lambda: thread.loop.call_soon_threadsafe(client.leave), account).install()
    link = GrpcLink(client, thread, ranks.rank, account)
    device = DeviceTurns(step, link, ranks, run_dir, first=turn) if shared else None
    loop = TrainingLoop(
        step=step,
        link=link,
        publisher=_snapshot_publisher(run, policy, step, ranks, directories, publisher),
        checkpoints=checkpoints,
        ranks=ranks,
        device=device,
        num_steps=recipe.run.steps,
        checkpoint_every=config.trainer.checkpoint_every,
        check=numerics_gate(recipe, policy, step, tokenizer).check,
    )
    done = loop.recover(checkpoint_step, newest_version)
    if server is not None:
        thread.loop.call_soon_threadsafe(server.set_ready)
    done = loop.run(done)
    leaving = bool(ranks.max(torch.tensor(int(client.commands.leave), device=ranks.device)))
    if leaving and not client.commands.leave:
        raise PeerLostError("the ranks of another node got a signal to leave; a checkpoint is written")
    if config.trainer.export_final and not leaving and (device is None or device.wait_for_last()):
        client.report.state = TrainerState.EXPORTING
        _export(step, tokenizer, run_files.export(run_dir, policy), ranks, config, checkpoints.path(done))
    loop.wait_for_stop(done)


def _snapshot_publisher(
    run: RunSettings,
    policy: str,
    step: TrainStep,
    ranks: Ranks,
    directories: tuple[Path, ...],
    process: PublisherProcess | None,
) -> SnapshotPublisher:
    """Writes a snapshot of every version into ``directories`` and hands it to ``process``, which the first rank has."""
    from services.trainer.publish import SnapshotPublisher, Snapshots

    snapshots = Snapshots(
        step.model,
        ranks,
        run_id=run.run_id,
        policy=policy,
        dtype=run.recipe.policies[policy].published_dtype,
        algorithm=run.recipe.digest_algorithm(policy),
        directories=directories,
    )
    return SnapshotPublisher(policy=policy, snapshots=snapshots, process=process)


def _first_turn(client: OrchestratorClient, thread: LoopThread, run_dir: Path, policy: str, ranks: Ranks) -> int:
    """Join before the model is loaded, and wait for a turn on the device; returns its number. A collective.

    No deadline: the replicas may hold the device until they have freed it, and a dead one loses its lease.
    """
    import torch

    number = 0
    if ranks.is_first:
        kept = names.steps(names.checkpoints_directory(run_dir, policy))
        thread.call(client.join(max(kept, default=0), kept))
        number = thread.call(client.wait_for_turn())
    number = int(ranks.max(torch.tensor(number, device=ranks.device)))
    client.report.device_turn = number
    return number


def _watch_publisher(
    policy: str, client: OrchestratorClient, thread: LoopThread, publisher: PublisherProcess | None
) -> None:
    """Report the state of the publisher beside the training: replicas only know that they wait."""
    if publisher is None:
        return
    watch = PeerWatch(publisher_of(policy), lambda: publisher.address)
    client.report.peers = lambda: [state] if (state := watch.state()) is not None else []
    thread.loop.call_soon_threadsafe(lambda: client.start(watch.run(), "publisher watch"))


def _leave_ranks() -> None:
    from services.trainer.ranks.sharding import leave_ranks

    leave_ranks()


def _export(
    step: TrainStep, tokenizer: Any, directory: Path, ranks: Ranks, config: PolicyConfig, checkpoint: Path
) -> None:
    import torch

    from services.trainer.checkpoints import ExportFailedError, export_last

    dtype: torch.dtype = getattr(torch, config.published_dtype)
    try:
        export_last(step.model, tokenizer, directory, ranks, dtype, checkpoint)
    except ExportFailedError as error:  # the checkpoint holds the same weights: the run succeeds
        log.error("export.failed", path=str(directory), error=error.message)


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
