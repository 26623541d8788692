"""Studies that documents quote: `python -m gpushare.research.studies.NAME`."""
