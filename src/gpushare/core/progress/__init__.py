"""The device's counters attributed to tenants: how fast each of them runs."""
