"""Names environment variables that no process reads although they look like ones of Rollmill: misspelt, or of a predecessor."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from services.common.config.loading import port_variables
from services.common.config.recipe import Recipe

# Read by a process, a launch script or a test, whatever the recipe; a test compares them with the sources.
_ALWAYS = frozenset((
    "ORCHESTRATOR_PORT", "ORCHESTRATOR_HOST_EXTERNAL", "NODE_HOST", "INFERENCE_GPUS", "TRAINER_GPUS",
    "ENVGATEWAY_PORT", "CODE_JUDGE_PORT", "TASK_SERVER_PORT", "API_PROCESSES", "REDIS_URI", "REDIS_URL",
    "REDIS_KEY_PREFIX", "MAX_WORKERS", "MAX_EXECUTION_TIME", "MAX_MEMORY", "RUN_WORKERS", "ALLOW_PLAIN_REDIS", "ALLOW_TIER_0",
    "ROLLMILL_AGENTBENCH_PYTHON", "ROLLMILL_AGENTBENCH_ROOT", "ROLLMILL_DATA_ROOT", "ROLLMILL_DIE_WITH_PARENT",
    "ROLLMILL_EPISODE_SEED", "ROLLMILL_HOME", "ROLLMILL_HTTP_HOSTS", "ROLLMILL_KEYS", "ROLLMILL_REQUIRE",
    "ROLLMILL_SEED", "ROLLMILL_SERVER_KEY", "ROLLMILL_SERVER_PID", "ROLLMILL_SESSION", "ROLLMILL_SGLANG_PYTHON",
    "ROLLMILL_SKYPILOT_PYTHON", "ROLLMILL_VERIFIERS_PYTHON", "ROLLMILL_VLLM_PYTHON",
))  # fmt: skip
_OURS = re.compile(
    r"(INFERENCE|TRAINER|ORCHESTRATOR|ENVGATEWAY|WEIGHTS_PORT|CODE_JUDGE|TASK_SERVER|ROLLMILL)(?=[_\d])|WEIGHTS_PORT$"
)
_OF_GATEWAYS = re.compile(r"ALLOW_(TIER|PLAIN)|MAX_(MEM|EXEC)|RUN_WORK")
# First words of the variables of AstraFlow.
_EARLIER = {"ASTRAFLOW": "ORCHESTRATOR", "RAAS": "INFERENCE", "SERVICE_CUDA_VISIBLE_DEVICES": "INFERENCE_GPUS"}
_NOT_HERE = re.compile(  # Code Judge's config.py
    r"REDIS_(RESULT|WORK|SOCKET)\w*|(LONG_BATCH_)?MAX_(LONG_)?(BATCH|QUEUE|STDOUT)\w*|(PYTHON|CPP)_(EXECUT|COMPIL)\w*|"
    r"WORK_QUEUE_NAME|ERROR_CASE_SAVE_PATH"
)
_NEAR = 0.87  # of `difflib`: one wrong, missing or additional letter in eight


def unread_variables(recipe: Recipe | None, environment: Mapping[str, str]) -> list[str]:
    """One sentence for each variable that is not read here; ``recipe`` names services and policies. Without one, variables
    that begin like those of a run are left alone."""
    known = set(_ALWAYS)
    if recipe is not None:
        known |= port_variables(recipe.model_dump(mode="json", include={"inference": True, "policies": True})).keys()
        for kind, names in (("INFERENCE", recipe.inference), ("TRAINER", recipe.policies)):
            known |= {f"{kind}_{name.upper().replace('-', '_')}_GPUS" for name in names}
    told = [_told(name, known) for name in sorted(environment) if recipe is not None or not _OURS.match(name)]
    return [sentence for sentence in told if sentence is not None]


def _told(name: str, known: Iterable[str]) -> str | None:
    if name in known or name in ("PYTHON", "RUN_DIR"):
        return None
    if _NOT_HERE.fullmatch(name):
        return f"the variable {name} of Code Judge has no effect here: docs/envgateway.md lists those that have"
    earlier = next((word for word in _EARLIER if name == word or name.startswith(f"{word}_")), None)
    meant = name.upper() if earlier is None else _EARLIER[earlier] + name.removeprefix(earlier)
    is_ours = _OURS.match(meant) or _OF_GATEWAYS.match(meant)
    near = get_close_matches(meant, known, n=1, cutoff=0.6 if is_ours else _NEAR)
    if not near and not is_ours:
        return None
    instead = f"did you mean {near[0]}?" if near else "recipes/README.md lists those that are read"
    return f"the variable {name} is not read: {instead}"
