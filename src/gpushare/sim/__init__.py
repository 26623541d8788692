"""Simulators of clusters and jobs, on the same core as the live components."""
