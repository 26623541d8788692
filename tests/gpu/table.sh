#!/bin/bash
# The complete table of ten programs on an idle GPU machine with 16 CPU cores, from the repository's root:
# OUT=DIR tests/gpu/table.sh trial | MINUTES | twice MINUTES | alone [--simulated "NVIDIA H200"] [--programs N].
# Resumes what OUT holds. On an H200 the sets of different programs take about 13 minutes; those that hold a program twice
# 17, of which the first 13 hold 94% of the fours that jobs form and all pairs. Needs PyTorch and NVML's bindings (their
# wheel in .gpu-wheels will do), simulated neither. `twice` goes on with what .table holds, and leaves there what it has.
set -eu
export PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PATH=$PATH:/usr/local/nvidia/bin
OUT=${OUT:-.}
mkdir -p "$OUT"
site=/tmp/gpushare-site # as session.sh
if [ ! -d "$site" ] && compgen -G '.gpu-wheels/nvidia_ml_py-*.whl' >/dev/null; then
    timeout 60 python3 -m pip install -q --no-index --no-deps --target "$site" .gpu-wheels/*.whl
fi
export PYTHONPATH=src:$site
table="timeout -k 3 ${LIMIT:-590} ${PYTHON:-python3} -m gpushare.research.calibration.table"
part=${1:-}
shift || true
case $part in
trial) $table "$OUT/trial.jsonl" --part trial --budget 1.2 "$@" ;;
twice)
    minutes=${1:?twice how many minutes?}
    shift
    if [[ " $* " != *" --simulated "* ]]; then
        [ -e "$OUT/h200-table-twice.jsonl" ] || cp .table/h200-table-twice.jsonl "$OUT/" 2>/dev/null || true
        trap '{ mkdir -p .table && cp "$OUT/h200-table-twice.jsonl" .table/; } || true' EXIT
    fi
    $table "$OUT/h200-table-twice.jsonl" --part twice --budget "$minutes" "$@"
    ;;
alone) # up to six windows of each program alone, in the session of the sets with a program twice
    [ -e "$OUT/h200-table-twice.jsonl" ] || cp .table/h200-table-twice.jsonl "$OUT/" 2>/dev/null || true
    $table "$OUT/h200-table-twice.jsonl" --part alone --budget 4 "$@"
    ;;
*[0-9]*) $table "$OUT/h200-table.jsonl" --budget "$part" "$@" ;;
*)
    echo "how many minutes? or trial, twice MINUTES, or alone" >&2
    exit 2
    ;;
esac
