#!/usr/bin/env bash
# Every method, captured against the loop, each in a process of its own (the compiler is what takes the time).
out=$1
for method in $(python3 -c "from pfedhn.algorithms import ALGORITHMS; print(*ALGORITHMS)"); do
  python3 benchmarks/gpu.py --out "$out" --only equal --method "$method" > "$out.$method.log" 2>&1 &
done
wait
