"""Kubernetes for development, demo and tests, with what this machine has; standard library only."""
