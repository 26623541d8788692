"""What every process needs for its edges: options, back-off, and the server of metrics and probes."""
