"""Kopf operator: `kopf run -m gpushare_operator`. Handlers translate, core decides, the reconciler writes.

The admission server of `gpushare_operator.admission` is a program of its own.
"""

from gpushare_operator import handlers

__all__ = ["handlers"]
