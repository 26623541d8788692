"""Benchmarks: `python hack/bench latency` and `python hack/bench throughput`."""
