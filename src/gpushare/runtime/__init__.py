"""Common parts of every process: options, logs, back-off, a small heap, the server of metrics and probes."""
