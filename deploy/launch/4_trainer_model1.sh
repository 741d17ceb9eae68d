#!/usr/bin/env bash
# Start the trainer of policy model1 of a recipe, all its ranks: 4_trainer_model1.sh RECIPE [--set a.b=c ...]
# Variables: TRAINER_MODEL1_GPUS (the recipe's; one rank each), TRAINER_MODEL1_PORT (50072), WEIGHTS_PORT_MODEL1 (19862),
#   ORCHESTRATOR_PORT (50050), RUN_DIR (the orchestrator's; set it where that directory is not seen), PYTHON (python).
set -euo pipefail
recipe="${1:?usage: 4_trainer_model1.sh RECIPE [--set a.b=c ...]}"
shift
exec "${PYTHON:-python}" -m services.cli start "$recipe" trainer-model1 "$@"
