#!/usr/bin/env bash
# Start all of a recipe that belongs to this node and follow it to its end: recipes/run.sh RECIPE [--set a.b=c ...] [--profile tiny]
#   [--resume auto]. Started again, a recipe with run.resume: auto, or with --resume auto, goes on with its newest run.
# A recipe over two nodes is started on node 0; the command for the other node is then printed.
# Variables: INFERENCE_GPUS, INFERENCE_A_GPUS, INFERENCE_B_GPUS, TRAINER_GPUS, TRAINER_MODEL0_GPUS, TRAINER_MODEL1_GPUS (numbers
#   with commas; the recipe's), ORCHESTRATOR_PORT (50050), ENVGATEWAY_PORT (50080), INFERENCE_A_PORT (50061), INFERENCE_B_PORT
#   (50062), TRAINER_MODEL0_PORT (50071), TRAINER_MODEL1_PORT (50072), WEIGHTS_PORT_MODEL0 (19861), WEIGHTS_PORT_MODEL1 (19862),
#   CODE_JUDGE_PORT and TASK_SERVER_PORT (none), NODE_HOST (this node's name or address for others; its host name),
#   ROLLMILL_DATA_ROOT (folder of local datasets), REDIS_URI (programs run at workers), PYTHON (python).
set -euo pipefail
: "${1:?usage: recipes/run.sh RECIPE [--set a.b=c ...]}"
exec "${PYTHON:-python}" -P "$(dirname "$0")/../services/start.py" services.cli run "$@"
