"""Wires the trainer of one policy: publisher, model, link to the orchestrator, loop.

settings from the orchestrator | publisher | model, checkpoint | join | recover, ready | train | export | part
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import structlog
import torch
from safetensors import SafetensorError

from services.common import checkpoints as names
from services.common import run_files
from services.common.checkpoints import checkpoints_directory
from services.common.config.processes import Placement
from services.common.config.recipe import Recipe
from services.common.errors import RollmillError, UnknownPolicyError
from services.common.export import export_checkpoint
from services.common.lora import identity_of
from services.common.prometheus import Metric, serve_metrics
from services.common.rpc.run_client import PeerWatch, RunSettings, fetch_run
from services.common.rpc.server import Server
from services.common.system.devices import chosen_device, log_device
from services.common.system.machine import keep_freed_memory
from services.common.system.threads import Watchdog
from services.common.telemetry.accounts import ActivityName
from services.common.telemetry.accounts import publisher as publisher_of
from services.common.telemetry.logs import bind, configure
from services.common.text.chat import check_model_matches, check_same_vocabulary, load_tokenizer
from services.trainer.checkpoints import (
    Checkpoints,
    checkpoint_files,
    export_under_names_of_files,
    has_other_names_in_files,
    require_shared,
)
from services.trainer.config import Settings
from services.trainer.link import GrpcLink, LoopThread
from services.trainer.loop import DeviceTurns, TrainingLoop
from services.trainer.metrics import peak_flops
from services.trainer.model.optimizer import PolicyOptimizer
from services.trainer.model.policy_model import (
    AdapterSetup,
    PolicyModel,
    Scorer,
    WithoutAdapter,
    digest_base,
    load_policy_model,
    own_rates,
)
from services.trainer.numerics import NumericsGate
from services.trainer.publish import PublisherProcess, Snapshots, snapshot_directories, sweep
from services.trainer.publisher import PublisherSettings
from services.trainer.ranks import PeerLostError, Ranks, init_ranks, leave_on_signal, leave_ranks
from services.trainer.step import TrainStep

METRICS = (
    Metric("rollmill_training_step", "gauge", "The training step at hand.", "training_step"),
    Metric("rollmill_checkpoint_step", "gauge", "The step of the newest durable checkpoint.", "checkpoint_step"),
    Metric("rollmill_step_seconds", "gauge", "Seconds of the newest training step.", "step_seconds"),
    Metric("rollmill_training_tokens_per_second", "gauge", "Tokens trained per second in the newest step, all ranks.", "tokens_per_second"),
    Metric("rollmill_batch_wait_seconds_total", "counter", "Seconds spent waiting for batches.", "waited_s"),
    Metric("rollmill_failed_checkpoints_total", "counter", "Checkpoints that could not be written.", "failed_checkpoints"),
    Metric("rollmill_damaged_checkpoints", "gauge", "Checkpoints that were set aside as damaged.", "damaged_checkpoints"),
)  # fmt: skip


# --- Builds the training step of a policy from its section of the recipe, for the trainer and for offline replay.


# Timeout of the ranks' wait for the first, which waits for the orchestrator; a dead rank is noticed at once.
COLLECTIVE_TIMEOUT_S = 1800.0


def join_ranks(recipe: Recipe, policy: str) -> Ranks:
    """Join the ranks of the trainer, with the recipe's threads and device."""
    device = chosen_device(recipe.policies[policy].trainer.device, f"policies.{policy}.trainer.device")
    config = recipe.with_devices(has_gpu=device == "cuda").policies[policy].trainer
    torch.set_num_threads(config.threads)
    ranks = init_ranks(
        timeout_s=COLLECTIVE_TIMEOUT_S,
        device=device,
        always_group=config.compute_dtype != config.master_dtype or "reference" in config.offload,
    )
    log_device(str(ranks.device), config.compute_dtype)
    return ranks


def build_step(recipe: Recipe, policy: str, path: str, ranks: Ranks) -> tuple[TrainStep, Any]:
    """Build the training step of a policy from its starting checkpoint, and load the tokenizer beside the model.

    Raises:
        ConfigError: no model or no tokenizer at ``path``.
        ModelMismatchError: the tokenizer has ids that the model lacks, a teacher has another tokenizer, or the trainer computes
            the model otherwise than the model itself.
    """
    recipe = recipe.with_devices(has_gpu=ranks.device.type == "cuda")
    config = recipe.policies[policy]
    tokenizer = load_tokenizer(path)
    master: torch.dtype = getattr(torch, config.trainer.master_dtype)
    same = config.trainer.compute_dtype == config.trainer.master_dtype
    compute: torch.dtype | None = None if same else getattr(torch, config.trainer.compute_dtype)
    torch.manual_seed(recipe.run.seed)
    adapter = None
    if config.adapter is not None:
        adapter = AdapterSetup(config=config.adapter, dtype=master, seed=recipe.run.seed)
    model = load_policy_model(
        path,
        ranks,
        dtype=master if adapter is None else compute or master,  # a frozen base needs no master copy
        gradient_checkpointing=config.trainer.gradient_checkpointing is True,
        compute_dtype=compute,
        attention=config.trainer.attention,
        value_head=config.algorithm.value_head is not None,
        adapter=adapter,
    )
    if adapter is not None:
        model.base = digest_base(model.causal_lm, ranks, recipe.digest_algorithm(), path)
        model.adapter = identity_of(model.causal_lm, adapter.config, model.base.digest)
    if model.limit is not None:
        model.limit.check(config.model.context_length)
    check_model_matches(model.causal_lm, tokenizer=tokenizer)

    def frozen(source: str) -> PolicyModel:
        return load_policy_model(
            source,
            ranks,
            dtype=getattr(torch, config.trainer.frozen_dtype),
            trainable=False,
            compute_dtype=compute,
            attention=config.trainer.attention,
            offload="reference" in config.trainer.offload,
        )

    distillation = config.algorithm.distillation
    teacher = None
    if distillation is not None and distillation.teacher_model is not None:
        # Before the teacher's weights, which may take long to load.
        check_same_vocabulary(
            tokenizer, load_tokenizer(distillation.teacher_model), f"the teacher {distillation.teacher_model}"
        )
        teacher = frozen(distillation.teacher_model)
        check_model_matches(teacher.causal_lm, tokenizer=tokenizer)
    reference: Scorer | None = None
    if config.algorithm.needs_reference:
        reference = frozen(path) if config.adapter is None else WithoutAdapter(model)
    step = TrainStep(
        model,
        PolicyOptimizer(
            model.named_parameters(),
            recipe.optimizer(policy),
            offload="optimizer" in config.trainer.offload,
            rates=own_rates(config.algorithm.value_head),
        ),
        config.algorithm,
        ranks,
        max_tokens_per_micro_batch=config.trainer.token_budget,
        temperature=recipe.sampling.temperature,
        reference=reference,
        teacher=teacher,
        peak_flops=peak_flops(ranks.device, compute or master),
    )
    return step, tokenizer


def open_checkpoints(
    recipe: Recipe,
    policy: str,
    run_dir: Path,
    ranks: Ranks,
    model_files: Mapping[str, bytes] = MappingProxyType({}),
) -> Checkpoints:
    """The checkpoints of a policy in a run directory. New checkpoints contain ``model_files``."""
    assert recipe.run.id is not None
    return Checkpoints(
        checkpoints_directory(run_dir, policy),
        recipe.run.id,
        policy,
        recipe.policies[policy].trainer.keep_checkpoints,
        ranks,
        model_files,
    )


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
    publisher = None
    if rank == 0:
        publisher = PublisherProcess(
            PublisherSettings(
                run_id=run.run_id,
                policy=policy,
                weights=run.recipe.policies[policy].weights,
                metrics=run.recipe.metrics,
                host=settings.host,
                run_dir=run_dir,
            )
        )
    try:
        if publisher is not None:
            publisher.start()
        link = GrpcLink(thread, settings.orchestrator, run.run_id, policy, rank=rank, num_ranks=num_ranks)
        server = thread.call(_serve(run, policy, run_dir, link)) if rank == 0 else None
        try:
            _train(run, run_dir, link, publisher, server, thread)
            leave_ranks()
        finally:
            link.close()
            if server is not None:
                thread.call(server.stop(grace_s=STATUS_GRACE_S))
    finally:
        if publisher is not None:
            publisher.stop()
        watchdog.stop()
        thread.stop()


def _train(
    run: RunSettings,
    run_dir: Path,
    link: GrpcLink,
    publisher: PublisherProcess | None,
    server: Server | None,
    thread: LoopThread,
) -> None:
    recipe, policy = run.recipe, link.policy
    config = recipe.policies[policy]
    ranks = join_ranks(recipe, policy)
    require_shared(run_dir / "checkpoints" / policy, ranks)
    directories = snapshot_directories(config.weights, run_dir)
    if ranks.is_first:
        sweep(directories)
    if publisher is not None:  # its state is reported beside the training's: replicas only know that they wait
        watch = PeerWatch(publisher_of(policy), lambda: publisher.address)
        link.report.peers = lambda: [state] if (state := watch.state()) is not None else []
        link.start(watch.run(), "publisher watch")
    if not ranks.is_first:
        link.report_as_rank()
    shared = recipe.placement is Placement.SHARED
    turn = _first_turn(link, run_dir, ranks) if shared else 0
    step, tokenizer = build_step(recipe, policy, recipe.model_path(policy, run_dir), ranks)
    step.on_progress = link.account.beat
    files = checkpoint_files(step.model, tokenizer, config.published_dtype) if ranks.is_first else {}
    checkpoints = open_checkpoints(recipe, policy, run_dir, ranks, files)
    checkpoint_step = checkpoints.restore(step.model, step.optimizer)
    link.vocab_size = step.vocab_size
    own_newest = link.join(checkpoints.kept()) if ranks.is_first else -1
    newest_version = ranks.max(own_newest)[0]
    # From here on a signal ends every wait, and the rank leaves after the current training step.
    leave_on_signal(link.leave)
    snapshots = Snapshots(
        step.model,
        ranks,
        run_id=run.run_id,
        policy=policy,
        dtype=config.published_dtype,
        algorithm=recipe.digest_algorithm(),
        directories=directories,
        process=publisher,
    )
    bound, types = recipe.with_devices(has_gpu=ranks.device.type == "cuda").numerics(policy)
    device = DeviceTurns(step, link, ranks, run_dir, first=turn) if shared else None
    loop = TrainingLoop(
        step=step,
        link=link,
        publisher=snapshots,
        checkpoints=checkpoints,
        ranks=ranks,
        device=device,
        num_steps=recipe.run.steps,
        checkpoint_every=config.trainer.checkpoint_every,
        gate=NumericsGate(step, tokenizer, policy, config.trainer.max_mismatch or bound, types),
    )
    done = loop.recover(checkpoint_step, newest_version)
    if server is not None:
        thread.loop.call_soon_threadsafe(server.set_ready)
    done = loop.run(done)
    leaving = bool(ranks.max(link.leaving)[0])
    if leaving and not link.leaving:
        raise PeerLostError("the ranks of another node got a signal to leave; a checkpoint is written")
    if config.trainer.export_final and not leaving and (device is None or device.wait_for_last()):
        link.report.state = ActivityName.EXPORTING
        directory, checkpoint = run_files.export(run_dir, policy), checkpoints.path(done)
        try:
            if step.model.adapter is None and has_other_names_in_files(step.model.causal_lm):
                dtype = getattr(torch, config.published_dtype)
                export_under_names_of_files(step.model, tokenizer, directory, ranks, dtype)
            elif ranks.is_first:
                export_checkpoint(checkpoint, directory, replace=True)
            if ranks.is_first:
                log.info("model.exported", path=str(directory))
        except (
            OSError,
            SafetensorError,
            RollmillError,
        ) as error:  # the checkpoint holds the same weights: the run succeeds
            log.error("export.failed", path=str(directory), error=str(error))
    loop.wait_for_stop(done)


def _first_turn(link: GrpcLink, run_dir: Path, ranks: Ranks) -> int:
    """Join before the model is loaded, and wait for a turn on the device; returns its number. A collective.

    No deadline: the replicas may hold the device until they have freed it, and a dead one loses its lease.
    """
    number = 0
    if ranks.is_first:
        link.join(names.steps(names.checkpoints_directory(run_dir, link.policy)))
        number = link.wait_for_turn()
    number = ranks.max(number)[0]
    link.report.device_turn = number
    return number


async def _serve(run: RunSettings, policy: str, run_dir: Path, link: GrpcLink) -> Server:
    server = Server(
        service="trainer",
        instance_id=f"trainer-{policy}",
        host="127.0.0.1",
        port=run.recipe.policies[policy].trainer.port,
        run_id=run.run_id,
    )
    report = link.report
    steps = ("training_step", "checkpoint_step")
    server.set_gauges(
        lambda: {**report.gauges, **{name: getattr(report, name) for name in steps}}, lambda: {"state": report.state}
    )
    server.set_accounts(lambda: report.accounts())
    await server.start()
    await serve_metrics(server, run.recipe.metrics, METRICS, name=f"trainer-{policy}", run_dir=run_dir)
    return server
