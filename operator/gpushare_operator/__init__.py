"""Kopf operator, `python -m gpushare_operator run ...`: handlers translate, core decides, one loop writes.

The admission server of `gpushare_operator.admission` is a program of its own: it loads neither Kopf nor handlers.
"""

import sys

if __name__ in sys.argv:  # `kopf run -m gpushare_operator`, by a chart older than its image
    from gpushare_operator import handlers  # noqa: F401
