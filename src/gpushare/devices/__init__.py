"""The sides of the `Devices` Protocol: NVML with GPM, dcgm-exporter, and the switch to simulated ones."""
