"""Implementations of the `Devices` Protocol: NVML with GPM, dcgm-exporter, and access to simulated GPUs."""
