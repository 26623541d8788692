"""Grafana's dashboards as code; generate.py writes them into the chart."""
