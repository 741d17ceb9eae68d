#!/bin/bash
# The numbers of the tests, not those in /app, which the agent could have changed.
expected=0
while read -r number; do expected=$((expected + number)); done < /tests/numbers.txt
if [ "$(cat /app/sum.txt 2>/dev/null)" = "$expected" ]; then
  echo 1 > /logs/verifier/reward.txt
else
  echo 0 > /logs/verifier/reward.txt
fi
