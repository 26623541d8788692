"""Benchmarks: `python -m bench latency` and `python -m bench throughput`."""
