"""Common parts of every process: options, logs, certificates, a small heap, the server of metrics and probes."""
