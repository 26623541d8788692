"""What every process needs for its edges: options, back-off, a small heap, the server of metrics and probes."""
