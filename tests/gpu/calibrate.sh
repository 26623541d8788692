#!/bin/bash
# The H200's datasets in src/gpushare/data, in two sessions of ten minutes on an idle GPU machine, from the repository's
# root: OUT=DIR tests/gpu/calibrate.sh 1|2. Give the machine 16 CPU cores: 48 workers wait, up to eight run at a time.
# Then, anywhere: python -m gpushare.research.studies.join_sessions OUT/h200-colocation.jsonl 1=OUT/session-1.jsonl 2=OUT/session-2.jsonl
set -eu
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PATH=$PATH:/usr/local/nvidia/bin
OUT=${OUT:-.}
collect="timeout -k 3 595 python3 -m gpushare.research.calibration"
case ${1:-} in
1) # without probes; 44 programs when it was run
    $collect "$OUT/h200-time-slicing.jsonl" --time-slicing --seed 2 --phases 1 --runs-per-phase 50 --budget 0.8
    $collect "$OUT/session-1.jsonl" --no-probes --seed 2 --phases 5 --runs-per-phase 140 --budget 8.65
    ;;
2) # with probes; three groups of 15 of the 60 programs
    $collect "$OUT/session-2.jsonl" --seed 3 --phases 4 --stop-phases 3 --runs-per-phase 300 --budget 9.4
    ;;
*)
    echo "which session? 1 or 2" >&2
    exit 2
    ;;
esac
