#!/usr/bin/env bash
# Start inference service a of a recipe, on the node that the recipe gives it: 1_inference_a.sh RECIPE [--set a.b=c ...]
# Variables: ORCHESTRATOR_HOST_EXTERNAL (host name of node 0; required on every other node, which reaches it through ssh),
#   ORCHESTRATOR_PORT (50050), INFERENCE_A_PORT (50061), INFERENCE_A_GPUS or INFERENCE_GPUS (the recipe's), PYTHON (python);
#   behind a tunnel also ENVGATEWAY_PORT (50080), WEIGHTS_PORT_MODEL0 (19861), WEIGHTS_PORT_MODEL1 (19862).
set -euo pipefail
recipe="${1:?usage: 1_inference_a.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -m services.cli start "$recipe" inference-a "$@"
