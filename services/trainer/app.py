"""Wires the trainer of one policy: publisher, model, link to the orchestrator, loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from services.common.config.policy import PolicyConfig
from services.common.config.recipe import Recipe
from services.common.errors import UnknownPolicyError
from services.common.logs import bind, configure
from services.common.rpc.run_client import RunSettings, fetch_run
from services.common.rpc.server import Server
from services.common.serde import Interval
from services.common.types import RankBatch, WeightVersion
from services.common.weights.snapshot_file import DEFAULT_DIRECTORIES, sweep_orphans
from services.trainer.loop_thread import LoopThread
from services.trainer.orchestrator_client import OrchestratorClient
from services.trainer.publisher_process import PublisherProcess

log = structlog.get_logger()

COLLECTIVE_TIMEOUT_S = 600.0


def run_trainer(policy: str, orchestrator: str, run_dir: Path | None) -> None:
    """Run one rank until the orchestrator says stop.

    Raises ``MillraceError`` with what to do: an unreachable orchestrator, an unknown policy, another model's checkpoint.
    """
    thread = LoopThread("trainer-grpc")
    settings = thread.call(fetch_run(orchestrator))
    recipe = settings.recipe
    if policy not in recipe.policies:
        raise UnknownPolicyError(f"no policy {policy!r} in this run; --policy is one of {sorted(recipe.policies)}")
    directory = run_dir or settings.run_dir
    configure("trainer", directory, f"trainer-{policy}")
    bind(run=settings.run_id, policy=policy)
    from services.trainer.sharding import init_ranks

    config = recipe.policies[policy]
    device = None if config.trainer.device == "auto" else config.trainer.device
    mixed = config.trainer.compute_dtype != config.trainer.master_dtype
    ranks = init_ranks(timeout_s=COLLECTIVE_TIMEOUT_S, device=device, always_group=mixed)
    publisher = _start_publisher(settings, policy, config, directory) if ranks.is_first else None
    client = thread.call(_connect(orchestrator, settings.run_id, policy, ranks.world_size))
    server = thread.call(_serve(config, policy, settings.run_id, client)) if ranks.is_first else None
    try:
        _train(settings, policy, directory, ranks, client, thread, publisher, server)
    finally:
        thread.call(client.close())
        if server is not None:
            thread.call(server.stop(grace_s=1.0))
        if publisher is not None:
            publisher.stop()
        thread.stop()


def _train(
    settings: RunSettings,
    policy: str,
    directory: Path,
    ranks: Any,
    client: OrchestratorClient,
    thread: LoopThread,
    publisher: PublisherProcess | None,
    server: Server | None,
) -> None:
    import torch

    from services.common.models import check_model_matches, load_tokenizer
    from services.trainer.checkpoint import CheckpointIdentity, Checkpoints
    from services.trainer.export import export
    from services.trainer.loop import TrainingLoop, require_steps

    recipe = settings.recipe
    config = recipe.policies[policy]
    torch.set_num_threads(config.trainer.threads)
    path = recipe.model_path(policy, directory)
    tokenizer = load_tokenizer(path)
    step = build_step(recipe, policy, path, ranks)
    check_model_matches(step.model.causal_lm, tokenizer=tokenizer)
    checkpoints = Checkpoints(
        directory / "checkpoints" / policy,
        CheckpointIdentity(run_id=settings.run_id, policy=policy),
        config.trainer.keep_checkpoints,
        ranks,
    )
    checkpoint_step = checkpoints.newest() or 0
    if checkpoint_step:
        checkpoints.load(checkpoint_step, step.model, step.optimizer)
    newest_version = -1
    if ranks.is_first:
        welcome = thread.call(client.join(checkpoint_step))
        require_steps(recipe.run.steps, welcome.num_steps)
        newest_version = welcome.newest_version
    newest_version = int(ranks.max(torch.tensor(newest_version, device=ranks.device)))
    loop = TrainingLoop(
        step=step,
        link=GrpcLink(client, thread, ranks.rank),
        publisher=SnapshotPublisher(settings.run_id, policy, config, directory, step.model, ranks, publisher),
        checkpoints=checkpoints,
        ranks=ranks,
        num_steps=recipe.run.steps,
        checkpoint_every=config.trainer.checkpoint_every,
    )
    if server is not None:
        server.set_gauges(
            lambda: {"failed_checkpoints": loop.failed_checkpoints, "training_step": client.report.training_step},
            lambda: {"state": client.report.state},
        )
    done = loop.recover(checkpoint_step, newest_version)
    if server is not None:
        thread.loop.call_soon_threadsafe(server.set_ready)
    loop.run(done)
    if config.trainer.export_final:
        dtype: torch.dtype = getattr(torch, config.weights.publish_dtype)
        export(step.model, tokenizer, directory / "export" / policy, ranks, dtype)


def build_step(recipe: Recipe, policy: str, path: str, ranks: Any) -> Any:
    """The training step of a policy from its starting checkpoint."""
    import torch

    from services.trainer.model import load_policy_model
    from services.trainer.optimizer import PolicyOptimizer
    from services.trainer.step import TrainStep

    config = recipe.policies[policy]
    master: torch.dtype = getattr(torch, config.trainer.master_dtype)
    compute: torch.dtype | None = getattr(torch, config.trainer.compute_dtype)
    compute = None if compute == master else compute
    torch.manual_seed(recipe.run.seed)
    model = load_policy_model(
        path,
        ranks,
        dtype=master,
        gradient_checkpointing=config.trainer.gradient_checkpointing,
        compute_dtype=compute,
        logprob_chunk_tokens=config.trainer.logprob_chunk_tokens,
    )
    reference = None
    if config.algorithm.kl_coefficient > 0:
        reference = load_policy_model(
            path,
            ranks,
            dtype=master,
            trainable=False,
            compute_dtype=compute,
            logprob_chunk_tokens=config.trainer.logprob_chunk_tokens,
        )
    return TrainStep(
        model,
        PolicyOptimizer(model.named_parameters(), recipe.optimizer(policy)),
        config.algorithm,
        ranks,
        max_tokens_per_micro_batch=config.trainer.token_budget,
        temperature=recipe.sampling.temperature,
        reference=reference,
    )


@dataclass(slots=True)
class SnapshotPublisher:
    """Writes a snapshot and tells the publisher process."""

    run_id: str
    policy: str
    config: PolicyConfig
    run_dir: Path
    model: Any
    ranks: Any
    process: PublisherProcess | None

    def publish(self, version: int) -> WeightVersion | None:
        from services.trainer.snapshot import write_snapshot

        written = write_snapshot(
            self.model,
            self.ranks,
            run_id=self.run_id,
            policy=self.policy,
            version=version,
            dtype=self.config.weights.publish_dtype,
            directories=(*DEFAULT_DIRECTORIES, _spill(self.run_dir)),
        )
        if written is None or self.process is None:
            return None
        self.process.announce(written.path)
        return WeightVersion(
            policy=self.policy,
            number=version,
            digest=written.manifest.digest,
            sources=(self.process.address,),
        )


class GrpcLink:
    """The loop's view of the orchestrator: synchronous, over the client's event loop."""

    def __init__(self, client: OrchestratorClient, thread: LoopThread, rank: int) -> None:
        self._client = client
        self._thread = thread
        self._rank = rank

    def pull(self, training_step: int) -> RankBatch | None:
        return self._thread.call(self._client.pull(training_step, self._rank))

    def publish(
        self,
        version: WeightVersion,
        metrics: Mapping[str, float],
        intervals: Sequence[Interval],
        finished_at: float,
    ) -> None:
        self._thread.call(self._client.publish(version, metrics, intervals, finished_at))

    def set_state(self, state: str, training_step: int) -> None:
        self._client.report.state, self._client.report.training_step = state, training_step

    def set_checkpoint_step(self, step: int) -> None:
        self._client.report.checkpoint_step = step

    def take_checkpoint_command(self) -> bool:
        asked, self._client.commands.checkpoint = self._client.commands.checkpoint, False
        return asked

    @property
    def paused(self) -> bool:
        return self._client.commands.paused

    @property
    def stopped(self) -> bool:
        return self._client.commands.stop


def _start_publisher(settings: RunSettings, policy: str, config: PolicyConfig, run_dir: Path) -> PublisherProcess:
    _spill(run_dir).mkdir(parents=True, exist_ok=True)
    for removed in sweep_orphans((*DEFAULT_DIRECTORIES, _spill(run_dir))):
        log.info("snapshot.orphan_removed", path=str(removed))
    publisher = PublisherProcess(
        run_id=settings.run_id,
        policy=policy,
        port=config.weights.port,
        transfer=config.weights.transfer,
        keep=config.weights.keep_versions,
        full_every=config.weights.full_every,
        run_dir=run_dir,
    )
    publisher.start()
    return publisher


def _spill(run_dir: Path) -> Path:
    """Where snapshots go when shared memory is full."""
    return run_dir / "snapshots"


async def _connect(address: str, run_id: str, policy: str, num_ranks: int) -> OrchestratorClient:
    return OrchestratorClient(address, run_id, policy, num_ranks)  # channels belong to the running loop


async def _serve(config: PolicyConfig, policy: str, run_id: str, client: OrchestratorClient) -> Server:
    server = Server(
        service="trainer",
        instance_id=f"trainer-{policy}",
        host="127.0.0.1",
        port=config.trainer.port,
        run_id=run_id,
        port_setting=f"policies.{policy}.trainer.port",
    )
    server.set_gauges(dict, lambda: {"state": client.report.state})
    await server.start()
    return server
