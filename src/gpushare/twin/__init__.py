"""Simulated GPUs, MPS and tenants for tests, the demo and CI.

No process imports it, but for the switch that makes devices simulated.
"""
