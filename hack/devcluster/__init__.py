"""A Kubernetes for development, demo and tests on whatever this machine has; standard library only."""
