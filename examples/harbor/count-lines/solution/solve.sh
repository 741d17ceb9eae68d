#!/bin/bash
cd /app/logs || exit 1
for file in *.log; do echo "$file $(grep -c error "$file")"; done > /app/counts.txt
