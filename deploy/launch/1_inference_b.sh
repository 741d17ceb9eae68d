#!/usr/bin/env bash
# Start inference service b of a recipe, on the node that the recipe gives it: 1_inference_b.sh RECIPE [--set a.b=c ...]
# Variables: ORCHESTRATOR_PORT (50050), INFERENCE_B_PORT (50062), INFERENCE_B_GPUS or INFERENCE_GPUS (the recipe's), RUN_DIR
#   (runs/NAME of the recipe), PYTHON (python); on another node than 0 also ORCHESTRATOR_HOST_EXTERNAL (host name of node 0; required),
#   ROLLMILL_KEYS (the keys that were copied from node 0; RUN_DIR/keys), NODE_HOST (this node's address, if others may fetch
#   weights here).
set -euo pipefail
recipe="${1:?usage: 1_inference_b.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -P "$(dirname "$0")/../../services/start.py" services.cli start "$recipe" inference-b "$@"
