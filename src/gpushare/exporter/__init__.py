"""Metric families of the node; docs/metrics.md has a table of all of them."""

from gpushare.exporter.node import DeviceFigures, NodeCollector, NodeFigures, TenantFigures

__all__ = ["DeviceFigures", "NodeCollector", "NodeFigures", "TenantFigures"]
