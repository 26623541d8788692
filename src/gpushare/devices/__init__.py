"""The sides of the `Devices` Protocol: NVML with GPM, dcgm-exporter's figures, and the simulated one."""

from gpushare.twin.devices import SimulatedDevices

__all__ = ["SimulatedDevices"]
