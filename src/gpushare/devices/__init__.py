"""The sides of the `Devices` Protocol: NVML with GPM, dcgm-exporter's figures, and the simulated one."""

from gpushare.devices.simulated import SimulatedDevices

__all__ = ["SimulatedDevices"]
