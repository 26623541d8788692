"""hack/chaos: faults at random against the running cluster under load, and the soak; see `bench.chaos.cli`."""
