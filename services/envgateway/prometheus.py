"""Metrics of the environment gateway and of its workers: their gauges under the names of the field."""

from __future__ import annotations

from services.common.prometheus import Metric
from services.common.telemetry.gateway_queue import QueueGauge

_QUEUE = (
    Metric("rollmill_judge_queue_waiting_jobs", "gauge", "Jobs that wait for a slot.", "queue_{lane}_waiting"),
    Metric("rollmill_judge_queue_running_jobs", "gauge", "Jobs that run.", "queue_{lane}_running"),
    Metric("rollmill_judge_job_seconds", "gauge", "Mean seconds of a job in its slot, over about the last twenty.", "queue_mean_s"),
)  # fmt: skip

METRICS = (
    *_QUEUE,
    Metric("rollmill_judge_stored_results", "gauge", "Results kept for calls that are repeated.", "queue_stored_results"),
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

WORKER_METRICS = (
    *_QUEUE[1:],
    Metric("rollmill_worker_jobs_total", "counter", "Jobs by outcome, at this worker.", "{event}"),
)  # fmt: skip
