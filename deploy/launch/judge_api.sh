#!/usr/bin/env bash
# Serve Code Judge's HTTP interface; programs run at workers (judge_worker.sh): judge_api.sh [RECIPE]
# All API processes share one port and one Redis. One that dies is started again; its clients send their batch again.
# Variables: REDIS_URI (or REDIS_URL; required), CODE_JUDGE_PORT (8000), API_PROCESSES (16), MAX_EXECUTION_TIME (10 s; the
#   workers' as well), ENVGATEWAY_PORT (50080: gRPC of the first process, the others take free ports),
#   REDIS_KEY_PREFIX (rollmill), ALLOW_PLAIN_REDIS (1: Redis on another machine without TLS), ALLOW_TIER_0 (1: no isolation),
#   RUN_WORKERS (1: start a worker as well; 0), MAX_WORKERS (of this worker: CPUs it may use).
set -euo pipefail
: "${REDIS_URI:=${REDIS_URL:?set REDIS_URI to the Redis of the judge, such as redis://127.0.0.1:6379}}"
export REDIS_URI OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" CODE_JUDGE_PORT="${CODE_JUDGE_PORT:-8000}"
if [[ ! "${API_PROCESSES:=16}" =~ ^[1-9][0-9]*$ ]]; then
  echo "error: the variable API_PROCESSES is '$API_PROCESSES'; it must be a number above 0" >&2
  exit 1
fi
worker="${RUN_WORKERS:-0}" first="${ENVGATEWAY_PORT:-50080}"
readonly QUICK_S=10 # who gives up sooner than this after its start has settings that cannot work

declare -A port_of started
serve() { # PORT; the first process alone starts a worker, and slots are the worker's
  local run=0 slots=''
  if [[ "$1" == "$first" ]]; then run="$worker" slots="${MAX_WORKERS:-}"; fi
  RUN_WORKERS="$run" MAX_WORKERS="$slots" ROLLMILL_DIE_WITH_PARENT=$$ ENVGATEWAY_PORT="$1" "${PYTHON:-python}" -P "$(dirname "$0")/../../services/start.py" services.envgateway ${recipe:+--recipe "$recipe"} --share-http-port &
  port_of[$!]="$1" started[$!]="$SECONDS"
}
stop() {
  trap '' TERM INT
  # not only those of port_of: the signal may come between a start and its entry
  for pid in $(jobs -p); do kill -TERM "$pid" 2>/dev/null || true; done
  wait
  exit "$1"
}
recipe="${1:-}"
trap 'stop 0' TERM INT
serve "$first"
for ((n = 1; n < API_PROCESSES; n++)); do serve 0; done
while true; do
  for pid in "${!port_of[@]}"; do # not wait -n: it does not see a process that ended before it began to wait
    if kill -0 "$pid" 2>/dev/null; then continue; fi
    code=0
    wait "$pid" || code=$?
    port="${port_of[$pid]}" lived_s=$((SECONDS - started[$pid]))
    unset "port_of[$pid]" "started[$pid]"
    if ((code < 128 && code != 75 && lived_s < QUICK_S)); then stop "$code"; fi # from 128 on it was killed; 75: start again
    echo "an API process ended with $code; starting it again" >&2
    serve "$port"
  done
  sleep 0.2 &
  wait $! || true # and not in the foreground: a signal is handled at once
done
