"""The commands `gpushare` and `kubectl gpushare`.

Each group of commands is a module of this package with a `typer.Typer` named `app`; `root` lists and joins them.
"""

from gpushare.cli.root import main

__all__ = ["main"]
