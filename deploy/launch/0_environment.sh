#!/usr/bin/env bash
# Start the environment gateway of a recipe; with TASK_SERVER_PORT serve its environments alone, without a run, also to
#   AgentBench's clients: 0_environment.sh RECIPE [--set a.b=c ...]
# Variables: ENVGATEWAY_PORT (50080), TASK_SERVER_PORT (none), RUN_DIR (runs/NAME of the recipe), ORCHESTRATOR_PORT (50050), NODE_HOST
#   (this node's name or address for other nodes; its host name), PYTHON (python).
set -euo pipefail
recipe="${1:?usage: 0_environment.sh RECIPE [--set a.b=c ...]}"
shift
if [ -n "${TASK_SERVER_PORT:-}" ]; then
  exec "${PYTHON:-python}" -m services.envgateway --recipe "$recipe" "$@"
fi
exec "${PYTHON:-python}" -m services.cli start "$recipe" envgateway "$@"
