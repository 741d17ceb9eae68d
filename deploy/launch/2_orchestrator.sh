#!/usr/bin/env bash
# Start the orchestrator of a recipe, after making its run directory and starting checkpoints: 2_orchestrator.sh RECIPE [--set a.b=c ...]
# Started again it goes on with the run in RUN_DIR.
# For a recipe over several nodes it also makes the keys of the run and prints the commands for the other nodes.
# Variables: NODE_HOST (this node's name or address for other nodes; its host name), RUN_DIR (runs/NAME of the recipe), ORCHESTRATOR_PORT (50050), ENVGATEWAY_PORT (50080), ROLLMILL_DATA_ROOT (folder of
#   local datasets), PYTHON (python).
set -euo pipefail
recipe="${1:?usage: 2_orchestrator.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -P "$(dirname "$0")/../../services/start.py" services.cli start "$recipe" orchestrator "$@"
