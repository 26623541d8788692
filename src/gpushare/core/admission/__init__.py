"""Check and resolve a request: annotation over GpuShare over chart, owners, the sentence of each refusal."""
