#!/usr/bin/env bash
# Start the trainer of a policy: trainer.sh POLICY HOST:PORT
# Variables: NUM_RANKS (1; more run under torchrun), OMP_NUM_THREADS (1), CUDA_VISIBLE_DEVICES.
set -euo pipefail
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
policy="${1:?usage: trainer.sh POLICY HOST:PORT}" orchestrator="${2:?usage: trainer.sh POLICY HOST:PORT}"
ranks="${NUM_RANKS:-1}"
if [ "$ranks" -gt 1 ]; then
  exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node="$ranks" \
    -m services.trainer --policy "$policy" --orchestrator "$orchestrator"
fi
exec "${PYTHON:-python}" -m services.trainer --policy "$policy" --orchestrator "$orchestrator"
