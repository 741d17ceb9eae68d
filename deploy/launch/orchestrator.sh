#!/usr/bin/env bash
# Start the orchestrator of a run: orchestrator.sh RUN_DIR
# RUN_DIR holds recipe.json (`millrace run` writes it; so does `millrace resolve RECIPE RUN_DIR`).
set -euo pipefail
exec "${PYTHON:-python}" -m services.orchestrator --run-dir "${1:?usage: orchestrator.sh RUN_DIR}"
