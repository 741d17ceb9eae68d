"""Wiring: sandbox, judge, queue, graders, tools, environments, episodes and the servers that offer them.

sandbox <- judge <- queue <- tools <- environments <- episodes <- server
           (or workers) ^                   |
                        |- HTTP interface   `-> rewards <- math pool
                        `- execution, judging
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from services.common.aio import TaskOwner
from services.common.config.envgateway import EnvGatewayConfig
from services.common.config.processes import MetricsConfig
from services.common.dataset_rows import BuiltInReward
from services.common.errors import ConfigError, InfrastructureError
from services.common.extras import absent, load_extra, provided
from services.common.net.hosts import check_place
from services.common.pb import environment_pb2_grpc as pb_grpc
from services.common.pb import judge_pb2_grpc
from services.common.prometheus import Metric, serve_metrics
from services.common.rpc.interceptors import booked
from services.common.rpc.server import Server
from services.common.system.child import DIE_WITH_PARENT
from services.common.system.machine import GarbageSweeper
from services.common.system.processes import exited, process_group
from services.common.system.threads import Watchdog
from services.common.telemetry.accounts import GATEWAY, INFERENCE, Activity, ActivityName, TimeAccount
from services.common.telemetry.metrics import QueueGauge
from services.common.tools import load_tools
from services.envgateway import rpc
from services.envgateway.calls import THREADS
from services.envgateway.envs.base import EnvironmentContext
from services.envgateway.envs.episodes import EnvironmentRegistry, EpisodeManager, make_worlds
from services.envgateway.judge.judge import Judge
from services.envgateway.queue import JobQueue, local_queue
from services.envgateway.rewards.pool import MathPool, comparisons
from services.envgateway.rewards.registry import Rewards
from services.envgateway.rpc import (
    CodeExecutionServicer,
    EnvironmentServicer,
    JudgeServicer,
    RewardServicer,
    by_client,
)
from services.envgateway.sandbox.pool import SandboxPool
from services.envgateway.tools.registry import ToolBox
from services.envgateway.tools.tools import built_in_tools

# --- Metrics of the environment gateway: its gauges under the names of the field.


RUNNING_METRICS = (  # of workers as well
    Metric("rollmill_judge_queue_running_jobs", "gauge", "Jobs that run.", "queue_{lane}_running"),
    Metric("rollmill_judge_job_seconds", "gauge", "Mean seconds of a job in its slot, over about the last twenty.", "queue_mean_s"),
)  # fmt: skip
METRICS = (
    Metric("rollmill_judge_queue_waiting_jobs", "gauge", "Jobs that wait for a slot.", "queue_{lane}_waiting"),
    *RUNNING_METRICS,
    Metric("rollmill_judge_unanswered_jobs", "gauge", "Jobs sent to workers and not answered yet.", QueueGauge.UNANSWERED),
    Metric("rollmill_judge_workers", "gauge", "Workers that are heard of.", QueueGauge.WORKERS),
    Metric("rollmill_judge_worker_slots", "gauge", "Slots of all workers.", "queue_worker_slots"),
    Metric("rollmill_judge_redis_connected", "gauge", "1 while Redis answers.", QueueGauge.REDIS_CONNECTED),
    Metric("rollmill_judge_jobs_total", "counter", "Jobs by outcome, at the gateway.", "queue_{event}"),
    Metric("rollmill_sandbox_busy_slots", "gauge", "Slots of the sandbox that run a program.", "sandbox_busy_slots"),
    Metric("rollmill_sandbox_queued", "gauge", "Programs that wait for a slot of the sandbox.", "sandbox_queued"),
    Metric("rollmill_sandbox_live_processes", "gauge", "Processes that live on between calls.", "sandbox_live_processes"),
    Metric("rollmill_sandbox_runs_total", "counter", "Programs by how they ended, and restarts of fork servers.", "sandbox_{outcome}"),
    Metric("rollmill_episodes_live", "gauge", "Open episodes.", "episodes_live"),
    Metric("rollmill_episode_events_total", "counter", "Episodes created and ended by reason, and steps taken.", "episodes_{event}"),
    Metric("rollmill_tool_calls_total", "counter", "Tool calls by status.", "tool_calls_{status}"),
    Metric("rollmill_rewards_total", "counter", "Rewards by outcome.", "rewards_{outcome}"),
    Metric("rollmill_math_worker_events_total", "counter", "Math workers replaced, by reason.", "math_worker_{event}"),
    Metric("rollmill_reasoning_gym_worker_events_total", "counter", "Workers of reasoning-gym replaced, by reason.", "reasoning_gym_worker_{event}"),
    Metric("rollmill_mcp_sessions", "gauge", "Open sessions at an MCP server.", "mcp_{server}_sessions"),
    Metric("rollmill_mcp_events_total", "counter", "Calls of an MCP server, failures, and sessions made again.", "mcp_{server}_{event}"),
    Metric("rollmill_stalled_threads", "gauge", "Threads of environments or tools that do not return.", "stalled_threads"),
    Metric("rollmill_oldest_thread_seconds", "gauge", "Age of the oldest of these threads.", "oldest_thread_s"),
    Metric("rollmill_world_processes", "gauge", "Processes that hold an environment's games.", "{world}_engine_processes"),
    Metric("rollmill_world_games", "gauge", "Games that are open in them.", "{world}_engine_games"),
    Metric("rollmill_world_events_total", "counter", "Starts and ends of these processes.", "{world}_engine_{event}"),
)  # fmt: skip


_WORKER_GRACE_S = 30.0  # for its running programs
THREAD_OVERDUE_S = 20.0  # of one call of user code, before its stack is logged
_ACTIVITIES = {
    "/rollmill.v1.EnvironmentService/": ActivityName.PLAYING_EPISODES,
    "/rollmill.v1.CodeExecutionService/": ActivityName.RUNNING_PROGRAMS,
    "/rollmill.v1.JudgeService/": ActivityName.JUDGING_PROGRAMS,
    "/rollmill.v1.RewardService/": ActivityName.COMPUTING_REWARDS,
}


class Gateway:
    """One gateway process. The sandbox starts before this module, and with this module grpc, is imported."""

    def __init__(
        self,
        config: EnvGatewayConfig,
        sandbox: SandboxPool,
        run_id: str = "",
        redis_uri: str | None = None,
        *,
        metrics: MetricsConfig | None = None,
        run_dir: Path | None = None,
    ) -> None:
        """``redis_uri`` instead of the config's: where workers take jobs from; empty runs them here."""
        self.sandbox = sandbox
        self._metrics = metrics or MetricsConfig()
        self._run_dir = run_dir
        self._math = MathPool(config.math)
        self._comparisons = comparisons()
        redis_uri = config.queue.redis_uri if redis_uri is None else redis_uri
        self.queue: JobQueue
        if redis_uri:
            if "redis" not in provided("queues"):
                raise ConfigError(f"envgateway.queue.redis_uri: {absent('queues', 'redis')}")
            self.queue = load_extra("queues", "redis")(config.queue, redis_uri)
        else:
            self.queue = local_queue(sandbox, Judge(sandbox, self._comparisons.failure))
        self._reasoning = MathPool(config.reasoning_gym, BuiltInReward.REASONING_GYM)
        self._rewards = Rewards(
            self._math,
            self.queue,
            config.rewards,
            case_time_s=config.code.case_time_s,
            reasoning_pool=self._reasoning,
        )
        self.tools = ToolBox(
            [*built_in_tools(config, self.queue, sandbox.live), *load_tools(config.tools.paths)],
            load_extra("tool_servers", "mcp")(config.extra("mcp")) if config.extra("mcp") else None,
        )
        self._environments = EnvironmentRegistry(
            config.environments, EnvironmentContext(self._rewards, self.tools), make_worlds(config, sandbox)
        )
        environments = self._environments
        self._episodes = EpisodeManager(environments, max_episodes=config.max_episodes, lease_s=config.episode_lease_s)
        self._tasks = TaskOwner()
        self._account = TimeAccount(GATEWAY, rest=Activity(ActivityName.WAITING_FOR_CALLS, on=INFERENCE))
        self._watchdog = Watchdog(
            threads="environments, rewards and tools", stuck=lambda: THREADS.overdue(THREAD_OVERDUE_S)
        )
        self.server = Server(
            service="envgateway",
            instance_id="envgateway",
            host=config.host,
            port=config.port,
            run_id=run_id,
            around=[by_client, booked(self._account, _ACTIVITIES)],
        )
        for name, add, servicer in (
            ("Environment", pb_grpc.add_EnvironmentServiceServicer_to_server, EnvironmentServicer(self._episodes)),
            ("CodeExecution", pb_grpc.add_CodeExecutionServiceServicer_to_server, CodeExecutionServicer(self.queue)),
            ("Judge", judge_pb2_grpc.add_JudgeServiceServicer_to_server, JudgeServicer(self.queue)),
            ("Reward", pb_grpc.add_RewardServiceServicer_to_server, RewardServicer(self._rewards)),
        ):
            self.server.add(add, servicer, f"rollmill.v1.{name}Service")
        self.server.set_accounts(lambda: [self._account.state()])
        self.server.set_gauges(self._gauges, lambda: {"isolation_tier": sandbox.tier})
        self.http = self.task_server = None  # where the recipe gives them a port
        http, tasks = config.extra("http"), config.extra("task_server")
        if http is not None and http.port is not None:
            self.http = load_extra("judge_http", "code_judge")(config, self.queue, self._rewards)
        if tasks is not None and tasks.port is not None:
            self.task_server = load_extra("task_server", "agentbench")(tasks, config.host, self._episodes, environments)

    async def start(self) -> int:
        """Serve; returns the port of gRPC."""
        self._watchdog.start()
        self.queue.start()
        port = await self.server.start()
        await serve_metrics(self.server, self._metrics, METRICS, name="envgateway", run_dir=self._run_dir)
        if self.http is not None:
            await self.http.start()
        if self.task_server is not None:
            await self.task_server.start()
        self._tasks.start(self._episodes.expire_forever(), "expire episodes")
        self._tasks.start(GarbageSweeper().run(), "collect garbage")
        self.server.set_ready()
        return port

    async def stop(self) -> None:
        """Refuse new calls, drain running ones, then close the parts that the calls use."""
        if self.http is not None:
            await self.http.stop()
        if self.task_server is not None:
            await self.task_server.stop()
        await self.server.stop()
        await self._tasks.close()
        await self._episodes.close_all()
        await self._environments.close()
        await self.tools.close()
        self._watchdog.stop()
        await self.queue.close()
        await asyncio.gather(
            self._math.close(), self._reasoning.close(), self._comparisons.close(), self.sandbox.close()
        )

    def _gauges(self) -> dict[str, float]:
        return {
            **self.sandbox.gauges,
            **self.queue.gauges,
            **self._environments.gauges,
            "episodes_live": float(self._episodes.num_live),
            "stalled_threads": float(THREADS.num_stalled),
            "oldest_thread_s": stuck.seconds if (stuck := THREADS.overdue(0.0)) is not None else 0.0,
            **{f"episodes_{name}": float(n) for name, n in self._episodes.counts.items()},
            **self.tools.gauges,
            **{f"rewards_{name}": float(n) for name, n in self._rewards.counts.items()},
            **{f"math_worker_{name}": float(n) for name, n in self._math.counts.items()},
            **{f"reasoning_gym_worker_{name}": float(n) for name, n in self._reasoning.counts.items()},
        }


async def serve(
    config: EnvGatewayConfig,
    sandbox: SandboxPool,
    run_id: str = "",
    redis_uri: str | None = None,
    *,
    metrics: MetricsConfig | None = None,
    run_dir: Path | None = None,
    orchestrator: str | None = None,
    worker: Sequence[str] = (),
) -> None:
    """Serve until SIGTERM or SIGINT. A gateway of an ``orchestrator``'s run also ends with the run. ``worker``: the command
    of a worker that runs as long as the gateway does."""
    if orchestrator is not None:
        check_place(orchestrator)
    gateway = Gateway(config, sandbox, run_id, redis_uri, metrics=metrics, run_dir=run_dir)
    # Install signal handlers before printing "ready": a reader of "ready" may ask for the stop at once.
    stop_asked = asyncio.create_task(gateway.server.wait_for_stop(), name="wait for a signal")
    broken = asyncio.create_task(gateway.queue.failed(), name="wait for a broken queue")
    waits: list[asyncio.Task[None]] = [stop_asked, broken]
    try:
        if worker:
            waits.append(asyncio.create_task(_work(worker), name="wait for the worker"))
        await asyncio.sleep(0)
        await gateway.start()
        if orchestrator is not None:
            staying = rpc.stay(orchestrator, gateway.server.address, run_id)
            waits.append(asyncio.create_task(staying, name="wait for the end of the run"))
        ended, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        if broken in ended and not broken.cancelled() and (error := broken.exception()) is not None:
            # A supervisor can restart a dead gateway, not one that has lost its way to the workers.
            raise InfrastructureError(f"the queue of programs is broken: {error!r}") from error
        for task in ended - {broken}:
            task.result()
    finally:
        for task in waits:
            task.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        await gateway.stop()


async def _work(command: Sequence[str]) -> None:
    """Run a worker. Raises ``ConfigError`` when it ends by itself, over its settings, and ``InfrastructureError`` when it was
    killed."""
    environment = {**os.environ, DIE_WITH_PARENT: str(os.getpid())}
    async with process_group(*command, grace_s=_WORKER_GRACE_S, env=environment) as process:
        code = await exited(process)
    if code > 0:
        raise ConfigError(f"the worker that RUN_WORKERS=1 started ended with code {code}: it has said why above")
    raise InfrastructureError(f"the worker that RUN_WORKERS=1 started was killed ({code})")
