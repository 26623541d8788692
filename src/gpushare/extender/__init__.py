"""HTTP front end of core for the stock kube-scheduler: filter, prioritize, bind and preempt (docs/design.md 2.2).

`python -m gpushare.extender` runs it; tests and benchmarks use `Extender` directly.
"""

import os

# Set before numpy is imported: idle OpenBLAS threads spin, and nothing here multiplies matrices.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from gpushare.extender.options import ExtenderOptions, parse_options
from gpushare.extender.server import Extender, serve

__all__ = ["Extender", "ExtenderOptions", "parse_options", "serve"]
