#!/usr/bin/env bash
# Start the trainer of policy model0 of a recipe, all its ranks: 3_trainer_model0.sh RECIPE [--set a.b=c ...]
# Variables: TRAINER_MODEL0_GPUS or TRAINER_GPUS (the recipe's; one rank each), TRAINER_MODEL0_PORT (50071), WEIGHTS_PORT_MODEL0 (19861),
#   ORCHESTRATOR_PORT (50050), RUN_DIR (the orchestrator's; set it where that directory is not seen), PYTHON (python).
set -euo pipefail
recipe="${1:?usage: 3_trainer_model0.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -m services.cli start "$recipe" trainer-model0 "$@"
