"""Datasets, calibration, fitting and evaluation: behind the extra `fit`; no process on a cluster imports it."""
