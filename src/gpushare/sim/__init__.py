"""Cluster and job simulators on the same core as the live parts."""
