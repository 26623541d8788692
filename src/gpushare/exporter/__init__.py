"""Metric families of the node and their HTTP endpoint; docs/metrics.md is the table of all of them."""

from gpushare.exporter.http import MetricsServer
from gpushare.exporter.node import DeviceFigures, NodeCollector, NodeFigures, TenantFigures

__all__ = ["DeviceFigures", "MetricsServer", "NodeCollector", "NodeFigures", "TenantFigures"]
