"""Profiles and the life of a GpuShare."""
