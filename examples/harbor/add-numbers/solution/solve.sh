#!/bin/bash
total=0
while read -r number; do total=$((total + number)); done < /app/numbers.txt
echo "$total" > /app/sum.txt
