#!/bin/bash
# The complete table of ten programs on an idle GPU machine with 16 CPU cores, from the repository's root:
# OUT=DIR tests/gpu/table.sh trial | MINUTES | alone. Resumes what OUT/h200-table.jsonl holds; on an H200 all of it takes about
# 13 minutes. Needs PyTorch and NVML's bindings.
set -eu
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PATH=$PATH:/usr/local/nvidia/bin
OUT=${OUT:-.}
table="timeout -k 3 ${LIMIT:-590} python3 -m gpushare.research.calibration.table"
case ${1:-} in
trial) $table "$OUT/trial.jsonl" --part trial --budget 1.2 ;;
alone) $table "$OUT/h200-table.jsonl" --part alone --budget 4 ;; # up to six windows of each program alone
*[0-9]*) $table "$OUT/h200-table.jsonl" --budget "$1" ;;
*)
    echo "how many minutes? or trial, or alone" >&2
    exit 2
    ;;
esac
