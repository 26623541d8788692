"""Measure workloads on a real GPU, alone and sharing it: what `gpushare calibrate` does.

`suite` holds the programs, `plan` chooses the runs, `worker` runs one program under one cap, and `collector` runs
workers at the same time and writes the colocation dataset v1. Needs PyTorch and an NVIDIA GPU; no process on a
cluster uses it.
"""
