"""The budget of code lines of each capability: who needs more says so in the diff of this table.

A file belongs to the first capability of which a prefix fits. A budget is the size at its last change plus 3%; a capability
that has become smaller than nine tenths of its budget gets a new one, so that the table stays near the truth.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from benchmarks.lines import source_files

REPOSITORY = Path(__file__).parents[2]

BUDGETS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tasks, data sets, curriculum": (1328, ("services/orchestrator/tasks/",)),
    "admission, groups, dispatch, evaluation": (
        1850,
        (
            "services/orchestrator/admission",
            "services/orchestrator/groups",
            "services/orchestrator/dispatcher",
            "services/orchestrator/members",
            "services/orchestrator/turns",
            "services/orchestrator/versions",
            "services/orchestrator/evaluation",
        ),
    ),
    "batches": (1234, ("services/orchestrator/buffer/",)),
    "journal, recovery, checks of records": (
        2236,
        ("services/orchestrator/journal/", "services/orchestrator/recovery", "services/orchestrator/ingest"),
    ),
    "stalls, progress, metrics, trackers": (
        1422,
        (
            "services/orchestrator/stalls",
            "services/orchestrator/watch",
            "services/orchestrator/progress",
            "services/orchestrator/metrics",
            "services/orchestrator/trackers",
        ),
    ),
    "orchestrator: services and life of a run": (1416, ("services/orchestrator/",)),
    "engine torch": (1587, ("services/inference/engine/torch/",)),
    "engines over servers": (1275, ("services/inference/engine/served/",)),
    "engine interface, scripted engine": (585, ("services/inference/engine/",)),
    "workflows": (2668, ("services/inference/workflows/",)),
    "endpoint for agents": (1254, ("services/inference/endpoint/",)),
    "weights: codec, transports, publisher, receiver": (
        2931,
        (
            "services/common/weights/",
            "services/common/transfer/",
            "services/trainer/publish",
            "services/inference/weights/",
        ),
    ),
    "replica: rollouts and reports": (2045, ("services/inference/",)),
    "trainer: models, packing, ranks": (
        2207,
        (
            "services/trainer/model/",
            "services/trainer/ranks",
            "services/trainer/launch_ranks",
        ),
    ),
    "checkpoints, exports, adapters": (
        1417,
        (
            "services/trainer/checkpoints",
            "services/common/checkpoints",
            "services/common/export",
            "services/common/lora",
            "services/common/safetensors_files",
        ),
    ),
    "losses, advantages, training step, loop": (2874, ("services/trainer/",)),
    "sandbox": (3839, ("services/envgateway/sandbox/",)),
    "judge and its queue": (
        1000,
        ("services/envgateway/judge/", "services/envgateway/queue", "services/envgateway/variables"),
    ),
    "rewards": (1074, ("services/envgateway/rewards/",)),
    "tools": (488, ("services/envgateway/tools/", "services/common/tools")),
    "extra: worlds": (2401, ("extras/worlds/",)),
    "extra: hub": (1751, ("extras/hub/",)),
    "extra: page": (974, ("extras/page/",)),
    "extra: deployment": (819, ("extras/deploy/",)),
    "extra: judging farm": (824, ("extras/farm/",)),
    "extra: rollmill data": (96, ("extras/prepare/",)),
    "extra: SGLang": (420, ("extras/sglang/",)),
    "extra: trackers": (432, ("extras/trackers/",)),
    "extra: Prometheus": (116, ("extras/prometheus/",)),
    "extra: MCP": (534, ("extras/mcp/",)),
    "extra: Code Judge over HTTP": (260, ("extras/code_judge/",)),
    "extra: vLLM": (547, ("extras/vllm/",)),
    "extra: compiled decoding": (340, ("extras/compiled/",)),
    "extra: push": (128, ("extras/push/",)),
    "gateway: episodes and RPCs": (1428, ("services/envgateway/",)),
    "settings": (2276, ("services/common/config/",)),
    "gRPC, HTTP, security": (
        2511,
        (
            "services/common/rpc/",
            "services/common/http",
            "services/common/security/",
            "services/common/net/",
            "services/cli/keys",
        ),
    ),
    "records and their conversion": (
        907,
        (
            "services/common/records",
            "services/common/wire",
            "services/common/wire",
            "services/common/kept_tokens",
            "services/common/dataset_rows",
        ),
    ),
    "telemetry": (699, ("services/common/telemetry/", "services/common/prometheus")),
    "text: chat, tools, programs": (1577, ("services/common/text/",)),
    "processes, errors, small models": (1465, ("services/common/", "services/start")),
    "check": (1865, ("services/cli/check/",)),
    "looking at a run: trace, fate, plots, journal": (2527, ("services/cli/inspect/",)),
    "watch and doctor": (869, ("services/cli/watch", "services/cli/doctor")),
    "launcher and commands": (2598, ("services/cli/",)),
    "recipes and the package rollmill": (537, ("recipes/", "rollmill/")),
}
MOST_FILES = 320  # with code


def measured() -> tuple[Counter[str], int]:
    """Code lines by capability, and the number of files with code."""
    lines, num_files = Counter[str](), 0
    for file in source_files(REPOSITORY):
        if not file.counts.code:
            continue
        name = next((name for name, (_, where) in BUDGETS.items() if str(file.path).startswith(where)), str(file.path))
        lines[name] += file.counts.code
        num_files += 1
    return lines, num_files


def test_each_capability_keeps_its_budget() -> None:
    lines, num_files = measured()
    assert set(lines) <= set(BUDGETS), "a file of no capability"
    over = {name: (lines[name], most) for name, (most, _) in BUDGETS.items() if lines[name] > most}
    assert over == {}, "more code lines than the budget: shrink, or raise the budget in this diff and say why"
    loose = {name: (lines[name], most) for name, (most, _) in BUDGETS.items() if lines[name] < 0.9 * most}
    assert loose == {}, "the budget is far above the code: lower it"
    assert num_files <= MOST_FILES
