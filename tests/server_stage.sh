#!/usr/bin/env bash
# Tests against a true server, SGLang's or vLLM's: makes its environment, sees whether a server starts there, runs the tests.
# Where it cannot be installed or started the last line says "SGLang not exercised" or "vLLM not exercised" with the reason: skipped, not passed.
# usage: tests/server_stage.sh SGLang|vLLM PYTHON ENVIRONMENT [PYTEST_ARGUMENTS]
set -uo pipefail
program=$1
python=$2
environment=$3
engine=${program,,}
log=$(mktemp)
trap 'rm -f "$log"' EXIT

skip() { # REASON
  tail -n 30 "$log" >&2
  echo "$program not exercised: $1"
  exit 0
}

reason() { # of what is in the log: its last error, or its last line
  { grep -iE '(error|no matching|no space)' "$log" | grep -v '^make' || tail -n 1 "$log"; } | tail -n 1
}

if ! "${MAKE:-make}" --no-print-directory "$engine-cpu-env" >"$log" 2>&1; then
  skip "its environment cannot be made here: $(reason)"
fi
if ! "$python" -m "extras.$engine.tests.probe" "$environment/bin/python" >"$log" 2>&1; then
  skip "its server does not start here: $(reason)"
fi
# One server at a time: each has several processes, which would take turns on few cores.
declare -x "ROLLMILL_${engine^^}_PYTHON=$(realpath --no-symlinks "$environment/bin/python")"
"$python" -m pytest -q -m "$engine" --durations=10 "${@:4}"
