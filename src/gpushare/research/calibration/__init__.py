"""Measuring workloads on a real GPU, alone and together: what `gpushare calibrate` does.

`suite` holds the programs, `plan` chooses the runs, `worker` runs one program under one cap, `collector` fires the
workers together and writes a colocation dataset v1. Needs PyTorch and an NVIDIA GPU; nothing on a cluster does.
"""
