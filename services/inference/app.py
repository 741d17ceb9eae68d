"""Wires one replica: engines, mirrors, workflow, membership. Ends when drained or told to stop."""

from __future__ import annotations

import asyncio
import socket
import sys
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import structlog

from services.common.aio import TaskOwner
from services.common.chat import Chat
from services.common.config.recipe import Recipe
from services.common.config.services import InferenceConfig
from services.common.errors import ConfigError
from services.common.logs import bind, configure
from services.common.pb import pool_pb2_grpc
from services.common.rpc.channel import channel
from services.common.rpc.run_client import RunSettings, fetch_run
from services.common.rpc.server import Server
from services.inference.byte_tokenizer import ByteTokenizer
from services.inference.emission import EmissionLog
from services.inference.engine.base import Engine, KvPolicy
from services.inference.engine.scripted import RandomTokens, ScriptedEngine
from services.inference.gateway_client import GatewayClient
from services.inference.gauges import WaitShares
from services.inference.mirror import Mirror
from services.inference.policies import ServedPolicy
from services.inference.pool_client import PoolClient, ReplicaIdentity
from services.inference.replica import Replica
from services.inference.rollout import RolloutPlayer
from services.inference.trajectory_sender import TrajectorySender
from services.inference.weight_updater import WeightUpdater
from services.inference.workflows.registry import build_workflow

log = structlog.get_logger()

DRAIN_TIMEOUT_S = 60.0
# The engine's thread and the event loop share the interpreter; the default of 5 ms would stall one for the other.
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True, slots=True)
class _Loaded:
    """One policy, ready to serve."""

    served: ServedPolicy
    mirror: Mirror


async def run_replica(
    *, orchestrator: str, name: str, replica_id: str, port: int | None, num_slots: int | None
) -> None:
    """Serve until drained, SIGTERM or a failure. Raises ``MillraceError`` with what to do."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    settings = await fetch_run(orchestrator)
    recipe = settings.recipe
    config = _section(recipe, name, port, num_slots)
    run_dir = settings.run_dir if settings.run_dir.is_dir() else None  # elsewhere when the replica is far away
    configure("inference", run_dir, f"inference-{replica_id}")
    bind(run=settings.run_id, replica=replica_id)
    server = Server(
        service="inference", instance_id=replica_id, host=config.host, port=config.port, run_id=settings.run_id
    )
    await server.start()
    emissions, waits = EmissionLog(), WaitShares(config.num_slots)
    loaded = {policy: _load(policy, settings, config, emissions) for policy in config.policies or recipe.policies}
    engines = {policy: item.served.engine for policy, item in loaded.items()}
    for engine in engines.values():
        await engine.start()
    try:
        await _serve(settings, config, replica_id, orchestrator, loaded, engines, emissions, waits, server)
    finally:
        for engine in engines.values():
            await engine.stop()
        await server.stop()


async def _serve(
    settings: RunSettings,
    config: InferenceConfig,
    replica_id: str,
    orchestrator: str,
    loaded: Mapping[str, _Loaded],
    engines: Mapping[str, Engine],
    emissions: EmissionLog,
    waits: WaitShares,
    server: Server,
) -> None:
    recipe = settings.recipe
    incarnation = uuid.uuid4().hex
    gateway = GatewayClient(waits)
    async with channel(orchestrator) as connection, TaskOwner() as tasks:
        sender = TrajectorySender(
            pool_pb2_grpc.PoolServiceStub(connection), replica_id=replica_id, incarnation=incarnation
        )
        player = RolloutPlayer(
            workflow=build_workflow(recipe.workflow),
            policies={policy: item.served for policy, item in loaded.items()},
            gateway=gateway,
            sink=sender,
            replica_id=replica_id,
            num_slots=config.num_slots,
            infra_retries=recipe.rollout.infra_retries,
            waits=waits,
        )
        updaters = {
            policy: WeightUpdater(
                item.mirror,
                item.served.engine,
                lambda: settings.run_id,
                Mirror.host_tensors if config.engine == "torch" else Mirror.host_arrays,
            )
            for policy, item in loaded.items()
        }
        replica = Replica(
            player=player, updaters=updaters, engines=engines, gateway=gateway, emissions=emissions, waits=waits
        )
        identity = ReplicaIdentity(
            replica_id=replica_id,
            incarnation=incarnation,
            num_slots=config.num_slots,
            labels={"host": socket.gethostname(), "engine": config.engine},
        )
        pool = PoolClient(connection, identity, replica)
        server.set_gauges(
            lambda: {
                "free_slots": player.num_free_slots,
                "running_rollouts": player.num_running,
                "unacknowledged": sender.num_unacknowledged,
                **{f"version_{policy}": updater.held().number for policy, updater in updaters.items()},
            },
            lambda: {"engine": config.engine, "state": "draining" if replica.draining else "serving"},
        )
        for policy, updater in updaters.items():
            tasks.start(updater.run(), f"weights of {policy}")
        tasks.start(sender.run(), "trajectories")
        membership = tasks.start(pool.run(), "pool membership")
        drained = tasks.start(_leave_when_drained(replica, player, sender, pool), "drain")
        stop = tasks.start(server.wait_for_stop(), "stop signal")
        failed = tasks.start(_first_failure(tasks), "failures")
        server.set_ready()
        done, _ = await asyncio.wait({membership, drained, stop, failed}, return_when=asyncio.FIRST_COMPLETED)
        if stop in done:
            pool.leave()
        elif drained in done:
            await membership
        for task in done:
            task.result()
    await player.close()
    await gateway.stop()


async def _first_failure(tasks: TaskOwner) -> None:
    await tasks.failed()


async def _leave_when_drained(
    replica: Replica, player: RolloutPlayer, sender: TrajectorySender, pool: PoolClient
) -> None:
    """Finish what is being played, see it acknowledged, leave."""
    while not replica.draining:
        await asyncio.sleep(0.1)  # a flag rather than an event: the pool's commands are plain calls
    await player.wait_until_idle()
    await sender.wait_until_acknowledged(DRAIN_TIMEOUT_S)
    pool.leave()
    log.info("replica.drained")


def _section(recipe: Recipe, name: str, port: int | None, num_slots: int | None) -> InferenceConfig:
    known = name in recipe.inference
    config = recipe.inference[name] if known else next(iter(recipe.inference.values()))
    changes: dict[str, Any] = {} if known else {"port": 0}
    changes |= {} if port is None else {"port": port}
    changes |= {} if num_slots is None else {"num_slots": num_slots}
    return config.model_copy(update=changes)


def _load(policy: str, settings: RunSettings, config: InferenceConfig, emissions: EmissionLog) -> _Loaded:
    context_length = settings.recipe.policies[policy].model.context_length
    engine_slots = config.engine_slots or config.num_slots
    mirror = Mirror(policy)
    engine: Engine
    if config.engine == "sglang":
        raise ConfigError(f"inference: engine sglang cannot be started by this version; write engine: torch for {policy}")
    if config.engine == "scripted":
        script = config.scripted
        engine = ScriptedEngine(
            script.script or RandomTokens(vocab_size=script.vocabulary, median_length=float(script.response_tokens)),
            num_slots=engine_slots,
            context_length=context_length,
            tokens_per_second=script.tokens_per_s,
            latency_s=script.latency_s,
            kv_policy=KvPolicy(config.kv_policy),
            version=-1,
            on_tokens=emissions.on_tokens,
        )
        chat = Chat(ByteTokenizer())
    else:
        engine, chat = _load_torch(policy, settings, config, engine_slots, mirror, emissions)
    served = ServedPolicy(name=policy, engine=engine, chat=chat, context_length=context_length)
    return _Loaded(served, mirror)


def _load_torch(
    policy: str,
    settings: RunSettings,
    config: InferenceConfig,
    engine_slots: int,
    mirror: Mirror,
    emissions: EmissionLog,
) -> tuple[Engine, Chat]:
    import torch

    from services.common.models import check_model_matches, load_model, load_tokenizer, named_weights
    from services.inference.engine.torch_engine import TorchEngine

    torch.set_num_threads(config.threads)
    recipe = settings.recipe
    section = recipe.policies[policy]
    path = recipe.model_path(policy, settings.run_dir)
    device = config.device if config.device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    # The mirror must see what the trainer sees: its master type, cast to the published one.
    model = load_model(path, section.trainer.master_dtype)
    tokenizer = load_tokenizer(path)
    check_model_matches(model, tokenizer=tokenizer)
    mirror.fill(named_weights(model), run_id=settings.run_id, version=0, dtype=section.weights.publish_dtype)
    engine = TorchEngine(
        model.to(getattr(torch, config.dtype)),
        num_slots=engine_slots,
        context_length=section.model.context_length,
        kv_policy=KvPolicy(config.kv_policy),
        device=device,
        on_tokens=emissions.on_tokens,
    )
    return engine, Chat(tokenizer)
