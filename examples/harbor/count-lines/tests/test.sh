#!/bin/bash
# Half of the reward for each file.
right=0
grep -qx "a.log 2" /app/counts.txt 2>/dev/null && right=$((right + 1))
grep -qx "b.log 0" /app/counts.txt 2>/dev/null && right=$((right + 1))
echo "{\"reward\": $((right / 2)).$((right % 2 * 5)), \"files\": $right}" > /logs/verifier/reward.json
