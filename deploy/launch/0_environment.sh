#!/usr/bin/env bash
# Serve environments alone, also to AgentBench's clients: 0_environment.sh RECIPE [--set a.b=c ...]
# Variables: TASK_SERVER_PORT (5000), ENVGATEWAY_PORT (the recipe's).
set -euo pipefail
export TASK_SERVER_PORT="${TASK_SERVER_PORT:-5000}"
recipe="${1:?usage: 0_environment.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -m services.envgateway --recipe "$recipe" "$@"
