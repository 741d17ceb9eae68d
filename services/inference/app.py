"""Starts one replica: engines, weights, workflow, pool membership. Ends when drained, on a stop signal or on a failure.

orchestrator --commands--> replica --> player --> workflow --> engine, gateway
                                 |            '--records--> trajectory sender --> orchestrator
                                 '--versions--> weights of each policy --> engine
"""

from __future__ import annotations

import asyncio
import sys
import uuid
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import structlog

from services.common.aio import TaskOwner, deadline
from services.common.config.processes import InferenceConfig, Placement
from services.common.errors import DeadlineError
from services.common.net.hosts import host_of, is_loopback
from services.common.pb import pool_pb2_grpc
from services.common.prometheus import serve_metrics
from services.common.rpc.client import channel
from services.common.rpc.run_client import PeerWatch, RunSettings, fetch_run
from services.common.rpc.server import Server
from services.common.security.keys import Peer
from services.common.system.machine import GarbageSweeper
from services.common.system.threads import Watchdog
from services.common.telemetry.accounts import GATEWAY, Activity, ActivityName, TimeAccount
from services.common.telemetry.accounts import replica as replica_component
from services.common.telemetry.logs import bind, configure
from services.common.transfer.bulk import PayloadSource
from services.common.transfer.servicer import add_weight_service
from services.inference.gateway import GatewayClient
from services.inference.loading import LoadedPolicy, load_policy, replica_config
from services.inference.records_out import TrajectorySender
from services.inference.replica import METRICS, EmissionLog, EngineTurns, Replica, ReplicaIdentity, gauges
from services.inference.rollouts import RolloutPlayer
from services.inference.workflows.base import REWARD_THREADS, REWARD_TIMEOUT_S
from services.inference.workflows.registry import build_workflows

if TYPE_CHECKING:
    from services.inference.endpoint.server import EndpointServer

log = structlog.get_logger(__name__)

DRAIN_TIMEOUT_S = 60.0  # for the last acknowledgements, after the last rollout
STOP_TIMEOUT_S = 5.0  # the same, when a signal ends the process
# The engine's thread and the event loop share the interpreter; the default of 5 ms would stall one for the other.
SWITCH_INTERVAL_S = 0.0005


async def run_replica(
    *,
    orchestrator: str,
    name: str,
    replica_id: str,
    port: int | None,
    num_slots: int | None,
    host: str | None = None,
    run_dir: Path | None = None,
) -> None:
    """Serve until drained, SIGTERM or a failure. Raises ``RollmillError``; the message names the remedy."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    configure("inference", None, f"inference-{replica_id}")
    settings = await fetch_run(orchestrator)
    config = replica_config(settings.recipe, name, port, num_slots, host)
    if run_dir is not None:
        settings = replace(settings, run_dir=run_dir)
    # On another machine the orchestrator's run directory does not exist.
    here = settings.run_dir if settings.run_dir.is_dir() else None
    configure("inference", here, f"inference-{replica_id}")
    bind(run=settings.run_id, replica=replica_id)
    await _Process(orchestrator, name, replica_id, settings, config).run(here)


class _Process:
    """The parts of one replica that live as long as the process; ``_play`` makes the parts that need a connection."""

    def __init__(
        self, orchestrator: str, name: str, replica_id: str, settings: RunSettings, config: InferenceConfig
    ) -> None:
        self._orchestrator = orchestrator
        self._replica_id = replica_id
        self._settings = settings
        self._config = config
        self._workflows = build_workflows(settings.recipe)  # before the models: a wrong setting fails within a second
        REWARD_THREADS.allow(config.num_slots)
        self._server = Server(
            service="inference",
            instance_id=replica_id,
            host=config.host,
            port=config.port,
            run_id=settings.run_id,
            port_setting=f"inference.{name}.port",
        )
        self._emissions = EmissionLog()
        self._account = TimeAccount(
            replica_component(replica_id), num_lanes=config.num_slots, rest=Activity(ActivityName.STARTING)
        )
        self._gateway = GatewayClient(self._account)
        self._gateway_watch = PeerWatch(GATEWAY, lambda: self._gateway.address)
        self._endpoint: EndpointServer | None = None
        if config.endpoint.port is not None:
            from services.inference.endpoint.server import EndpointServer  # a run without an endpoint needs no HTTP

            self._endpoint = EndpointServer(config.endpoint, config.host, setting=f"inference.{name}.endpoint.port")
        self._policies: dict[str, LoadedPolicy] = {}
        self._relays: dict[str, PayloadSource] = {}  # by policy: payloads that other replicas may fetch from here

    async def run(self, here: Path | None) -> None:
        """``here``: the run's directory on this machine, if the machine has one."""
        metrics, name = self._settings.recipe.metrics, f"inference-{self._replica_id}"
        # At half of a reward function's time, the stack of its thread is logged.
        watchdog = Watchdog(threads="reward functions", stuck=lambda: REWARD_THREADS.overdue(REWARD_TIMEOUT_S / 2))
        sections = [section.weights for section in self._settings.recipe.policies.values()]
        await add_weight_service(
            self._server,
            self._relays,
            send_bytes_per_s=min(
                (section.send_bytes_per_s for section in sections if section.send_bytes_per_s), default=0.0
            ),
            bulk_wanted=any("bulk" in section.transports for section in sections),
        )
        await self._server.start()
        watchdog.start()
        try:
            await serve_metrics(self._server, metrics, METRICS, name=name, run_dir=here)
            if self._endpoint is not None:
                await self._endpoint.start()
            await self._load_policies()
            async with channel(self._orchestrator, Peer.ORCHESTRATOR) as connection:
                await self._play(connection)
        finally:
            watchdog.stop()
            if self._endpoint is not None:
                await self._endpoint.stop()
            await self._gateway.stop()
            for loaded in self._policies.values():
                await loaded.served.engine.stop()
            await self._server.stop()

    async def _load_policies(self) -> None:
        for policy in self._config.policies or self._settings.recipe.policies:
            # In a thread, so that health is answered (NOT_SERVING) meanwhile.
            loaded = await asyncio.to_thread(
                load_policy, policy, self._settings, self._config, self._emissions.on_tokens, owner=self._replica_id
            )
            self._policies[policy] = loaded
            await loaded.served.engine.start()
            if loaded.relay is not None:
                self._relays[policy] = loaded.relay

    async def _play(self, connection: grpc.aio.Channel) -> None:
        """Join the pool and play, until drained, a stop signal, or a failure."""
        incarnation = uuid.uuid4().hex
        rollout = self._settings.recipe.rollout
        sender = TrajectorySender(
            pool_pb2_grpc.PoolServiceStub(connection), replica_id=self._replica_id, incarnation=incarnation
        )
        player = RolloutPlayer(
            workflows=self._workflows,
            policies={policy: loaded.served for policy, loaded in self._policies.items()},
            gateway=self._gateway,
            sink=sender,
            replica_id=self._replica_id,
            num_slots=self._config.num_slots,
            infra_retries=rollout.infra_retries,
            account=self._account,
            endpoint=self._endpoint,
            teachers=self._settings.recipe.teachers,
        )
        turns = EngineTurns(self._policies, player)
        if self._settings.recipe.placement is Placement.SHARED:
            await turns.free()
        # Other replicas reach this one: not at loopback when the run spans several machines.
        is_reached = not is_loopback(self._config.host) or is_loopback(host_of(self._orchestrator))
        identity = ReplicaIdentity(
            replica_id=self._replica_id,
            incarnation=incarnation,
            num_slots=self._config.num_slots,
            weights_address=self._server.address if self._relays and is_reached else "",
        )
        replica = Replica(
            connection,
            identity,
            policies=self._policies,
            player=player,
            gateway=self._gateway,
            emissions=self._emissions,
            account=self._account,
            turns=turns,
            more_accounts=(sender.account,),
            gateway_state=self._gateway_watch.state,
        )
        self._server.set_accounts(replica.accounts)
        self._server.set_gauges(
            lambda: gauges(player, sender, self._policies),
            lambda: {"engine": self._config.engine, "draining": str(replica.drain_requested.is_set()).lower()},
        )
        await self._until_done(replica, player, sender, turns)

    async def _until_done(
        self, replica: Replica, player: RolloutPlayer, sender: TrajectorySender, turns: EngineTurns
    ) -> None:
        async def drain() -> None:
            await replica.drain_requested.wait()
            await player.wait_until_idle()
            await sender.wait_until_acknowledged(DRAIN_TIMEOUT_S)
            log.info("replica.drained")

        async with TaskOwner() as tasks:
            for policy, loaded in self._policies.items():
                tasks.start(loaded.weights.run(), f"weights of {policy}")
            tasks.start(sender.run(), "trajectories")
            tasks.start(replica.watch_engines(), "engines")
            tasks.start(turns.run(), "device turns")
            tasks.start(self._gateway_watch.run(), "gateway watch")
            # Python's own collector would walk the objects of the model's libraries repeatedly: a tenth of the CPU.
            tasks.start(GarbageSweeper().run(), "collect garbage")
            membership = tasks.start(replica.run(), "pool membership")
            drained = tasks.start(drain(), "drain")
            stop = tasks.start(self._server.wait_for_stop(), "stop signal")
            failed = tasks.start(tasks.failed(), "first failure")
            self._server.set_ready()
            try:
                done, _ = await asyncio.wait({membership, drained, stop, failed}, return_when=asyncio.FIRST_COMPLETED)
                if stop in done and failed not in done:
                    await player.close()
                    try:
                        await sender.wait_until_acknowledged(STOP_TIMEOUT_S)
                    except DeadlineError as error:
                        unacknowledged = sender.num_unacknowledged
                        log.warning("replica.stopped_with_records", unacknowledged=unacknowledged, error=error.message)
                for task in done:
                    task.result()
                replica.leave()
                async with deadline(STOP_TIMEOUT_S + 1.0, "the last report to the orchestrator"):
                    await membership
            finally:
                await player.close()
