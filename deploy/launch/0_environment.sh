#!/usr/bin/env bash
# Start the environment gateway of a recipe, on the node that the recipe gives it: 0_environment.sh RECIPE [--set a.b=c ...]
#   [--profile tiny]. It ends with the run. With TASK_SERVER_PORT it serves its environments alone, without a run, also to
#   AgentBench's clients, until it is stopped.
# Variables: ENVGATEWAY_PORT (50080), TASK_SERVER_PORT (none), RUN_DIR (runs/NAME of the recipe), ORCHESTRATOR_PORT (50050), NODE_HOST
#   (this node's name or address for other nodes; its host name on node 0, elsewhere the address on the way to node 0), PYTHON
#   (python); on another node than 0 also ORCHESTRATOR_HOST_EXTERNAL (host name of node 0; required), ROLLMILL_KEYS (the keys that
#   were copied from node 0; RUN_DIR/keys).
set -euo pipefail
recipe="${1:?usage: 0_environment.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -P "$(dirname "$0")/../../services/start.py" services.cli start "$recipe" envgateway ${TASK_SERVER_PORT:+--alone} "$@"
