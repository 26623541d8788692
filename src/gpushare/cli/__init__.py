"""The commands `gpushare` and `kubectl gpushare`.

Each group of commands is a module of this package with a `typer.Typer` named `app`; `root` lists and combines
them.
"""

import os

# Set before numpy is loaded: our matrices are small, and waiting BLAS threads spin. Beside one other busy process,
# a job simulation of 4 s took 150 s on two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gpushare.cli.root import complete, main

__all__ = ["complete", "main"]
