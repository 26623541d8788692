#!/bin/bash
# The H200's datasets in src/gpushare/data: run from the repository's root on an idle GPU machine, 10 minutes.
# OUT is where the datasets go. Give the machine 16 CPU cores: 48 workers wait, up to eight run at a time.
set -eu
export PYTHONPATH=src PYTHONUNBUFFERED=1 PYTHONWARNINGS=ignore PATH=$PATH:/usr/local/nvidia/bin
OUT=${OUT:-.}
timeout -k 3 60 python3 -m gpushare.calibration "$OUT/h200-time-slicing.jsonl" --time-slicing --seed 2 --phases 1 --runs-per-phase 50 --budget 0.8
timeout -k 3 530 python3 -m gpushare.calibration "$OUT/h200-colocation.jsonl" --seed 2 --phases 5 --runs-per-phase 140 --budget 8.65
