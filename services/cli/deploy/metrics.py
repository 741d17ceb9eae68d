"""Configuration of Prometheus and Grafana for a deployment: scrape targets and a dashboard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import count
from typing import Any

import yaml

from services.common.config.recipe import Recipe
from services.common.system.free_ports import LOOPBACK

FIRST_PORT = 9464
SCRAPE_EVERY = "5s"
UID = "rollmill"

# title, unit of Grafana, queries: (expression, legend). Every metric in them exists; a test looks.
PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Weight version", "none", (("rollmill_weight_version", "ledger, {{policy}}"), ("rollmill_engine_weight_version", "{{instance}}"))),
    ("Mean reward before and in the newest batch", "none", (('rollmill_step_metric{metric="rollout_reward_mean"}', "rollouts finished since the batch before, raw, failures excluded: {{policy}}"), ('rollmill_step_metric{metric="batch_reward_mean"}', "sequences of the batch, as trained: {{policy}}"))),
    ("Tokens per second", "short", (("sum by (instance) (rate(rollmill_tokens_generated_total[1m]))", "sampled by {{instance}}"), ("rollmill_training_tokens_per_second", "trained by {{instance}}"))),
    ("Sequences on the way", "short", (("rollmill_expected_sequences", "played, {{policy}}"), ("rollmill_buffered_sequences", "buffered, {{policy}}"), ("rollmill_quota_sequences", "quota, {{policy}}"))),
    ("Staleness", "none", (('rollmill_step_metric{metric=~"staleness_mean|staleness_max"}', "{{metric}}, {{policy}}"),)),
    ("Where the time goes", "percentunit", (("sum by (component, activity, on) (rate(rollmill_activity_seconds_total[1m])) / ignoring (activity, on) group_left sum by (component) (rate(rollmill_activity_seconds_total[1m]))", "{{component}}: {{activity}} {{on}}"),)),
    ("Stalls", "s", (("rollmill_stalled_seconds", "{{component}}: {{cause}}"), ("rollmill_waits", "waits"))),
    ("Sequences dropped and rollouts failed, per second", "short", (("rate(rollmill_sequences_dropped_total[1m])", "{{reason}}"), ("rate(rollmill_rollout_failures_total[1m])", "failed: {{reason}}"), ("rate(rollmill_records_dropped_total[1m])", "records: {{outcome}}"))),
    ("Loss and gradient norm", "none", (('rollmill_step_metric{metric=~"trainer/(loss|grad_norm|mismatch_kl|entropy)"}', "{{metric}}, {{policy}}"),)),
    ("Trained tokens without gradient, effective samples", "percentunit", (('rollmill_step_metric{metric=~"trainer/zero_gradient_(of_positive_|of_negative_)?share"}', "{{metric}}, {{policy}}"), ('rollmill_step_metric{metric="trainer/effective_sample_share_min"}', "{{metric}}, {{policy}}"))),
    ("Training step", "s", (("rollmill_step_seconds", "{{instance}}"),)),
    ("Weights", "s", (("rollmill_weight_fetch_seconds", "fetch, {{instance}}"), ("rollmill_weight_swap_pause_seconds", "pause, {{instance}}"))),
    ("Weights sent", "Bps", (("rate(rollmill_weight_bytes_sent_total[1m])", "{{instance}}"),)),
    ("Judge and sandbox", "short", (("rollmill_judge_queue_waiting_jobs", "waiting, {{lane}}"), ("rollmill_judge_queue_running_jobs", "running, {{lane}}"), ("rollmill_sandbox_busy_slots", "sandbox slots"))),
    ("Judge job", "s", (("rollmill_judge_job_seconds", "{{instance}}"),)),
    ("Memory", "bytes", (("process_resident_memory_bytes", "{{instance}}"),)),
    ("Processor", "short", (("rate(process_cpu_seconds_total[1m])", "{{instance}}"),)),
)  # fmt: skip


def with_ports(recipe: Recipe, held: set[int]) -> dict[str, int]:
    """Assign a metrics port to each process: its own, or the next free one."""
    free = (port for port in count(FIRST_PORT) if port not in held)
    given = recipe.metrics.ports
    names = [name for name in recipe.processes_with_metrics() if name != "worker"]  # deployed by itself
    return {name: given.get(name) or next(free) for name in names}


def scrape_config(run: str, ports: Mapping[str, int]) -> str:
    """``prometheus.yml``."""
    targets = [
        {"targets": [f"{LOOPBACK}:{port}"], "labels": {"instance": name, "service": name.partition("-")[0], "run": run}}
        for name, port in ports.items()
    ]
    tree = {
        "global": {"scrape_interval": SCRAPE_EVERY},
        "scrape_configs": [{"job_name": "rollmill", "static_configs": targets}],
    }
    return yaml.safe_dump(tree, sort_keys=False)


def dashboard() -> str:
    """A Grafana dashboard, as JSON to import; the user chooses the Prometheus server at the import."""
    source = {"type": "prometheus", "uid": "${datasource}"}
    panels = [_panel(number, *panel, source) for number, panel in enumerate(PANELS)]
    choose = {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}
    tree = {
        "uid": UID,
        "title": "Rollmill",
        "tags": ["rollmill"],
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": [choose]},
        "panels": panels,
    }
    return json.dumps(tree, indent=1) + "\n"


def _panel(
    number: int, title: str, unit: str, queries: tuple[tuple[str, str], ...], source: dict[str, str]
) -> dict[str, Any]:
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": title,
        "datasource": source,
        "gridPos": {"h": 8, "w": 12, "x": 12 * (number % 2), "y": 8 * (number // 2)},
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + place), "datasource": source, "expr": expression, "legendFormat": legend}
            for place, (expression, legend) in enumerate(queries)
        ],
    }
