"""Node agent: gRPC device plugin, sampling, GpuNode status."""
