#!/usr/bin/env bash
# Start the trainer of policy model0 of a recipe, all its ranks on this node: 3_trainer_model0.sh RECIPE [--set a.b=c ...]
# Variables: TRAINER_MODEL0_GPUS or TRAINER_GPUS (the recipe's; one rank each), TRAINER_MODEL0_PORT (50071), WEIGHTS_PORT_MODEL0 (19861),
#   ORCHESTRATOR_PORT (50050), RUN_DIR (the orchestrator's; set it where that directory is not seen), PYTHON (python);
#   over several nodes also NODE (which of trainer.nodes this is; 0), and on others than 0 ORCHESTRATOR_HOST_EXTERNAL, ROLLMILL_KEYS.
set -euo pipefail
recipe="${1:?usage: 3_trainer_model0.sh RECIPE [--set a.b=c ...]}"
shift
share=""
[ "${NODE:-0}" = 0 ] || share="-node$NODE"
exec "${PYTHON:-python}" -P "$(dirname "$0")/../../services/start.py" services.cli start "$recipe" "trainer-model0$share" "$@"
