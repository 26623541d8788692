"""Forty real jobs at one GPU under six ways of sharing it: `python -m bench sharing run|report|plan DIR`.

Every way gets the same jobs at the same moments, as pods of a cluster or as processes on the machine. What was
measured is a file of JSON lines (records.py) that later sessions add to; analysis.py turns it into figures.
"""
