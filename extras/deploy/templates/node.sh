#!/usr/bin/env bash
# Starts all of {{ layout.path }} that belongs to node {{ node }}, and stays until the run is over; then stops the rest.
{% include "scripts.head" %}
set -euo pipefail
names=({{ names | join(" ") }})
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
declare -A name_of
stop() { # EXIT CODE
  trap '' TERM INT
  # not only those of name_of: the signal may come between a start and its entry
  for pid in $(jobs -p); do kill -TERM "$pid" 2>/dev/null || true; done
  wait
  exit "$1"
}
trap 'stop 143' TERM INT
for name in "${names[@]}"; do
  "$here/node{{ node }}-$name.sh" "$@" &
  name_of[$!]="$name"
done
while [ "${#name_of[@]}" -gt 0 ]; do
  for pid in "${!name_of[@]}"; do # not wait -n: it does not see a process that ended before it began to wait
    if kill -0 "$pid" 2>/dev/null; then continue; fi
    code=0
    wait "$pid" || code=$?
    if [ "$pid" = "${grace:-}" ]; then stop 0; fi
    name="${name_of[$pid]}"
    unset "name_of[$pid]"
    if [ "$code" -ne 0 ]; then
      echo "$name ended with $code; stopping the other processes of this script" >&2
      stop "$code"
    fi
    if [ "$name" = orchestrator ]; then
      sleep {{ "%g" % layout.recipe.launch.stop_grace_s }} &
      grace=$!
      name_of[$grace]=grace
    fi
  done
  sleep 0.2 &
  wait $! || true # and not in the foreground: a signal is handled at once
done
