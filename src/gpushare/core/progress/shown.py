"""A workload alone under a cap, when its counters with all threads are known: how fast it is there.

Work per unit of progress hardly depends on the cap, so what it draws there, as a part of what it draws with all
threads, is its progress; the law for counters under a cap alone (`alone.progress_under`) decides where they say
little.
"""

import math
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.progress.alone import progress_under
from gpushare.core.progress.attribution import Prior, TenantEvidence, attribute

_LAW_ERROR: Final = (
    0.12  # of `progress_under` on programs that it was not fitted to (docs/measurements/signatures.md)
)


def progress_shown(
    whole: Counters,
    seen: Counters,
    cap: float,
    *,
    whole_mhz: float | None = None,
    seen_mhz: float | None = None,
) -> float:
    """Infer progress alone under a cap (0 to 1), relative to all threads, from the counters under both.

    Args:
        whole: alone with all threads; seen: alone under the cap.
        whole_mhz, seen_mhz: mean SM clocks meanwhile; None: not known.

    Source: docs/measurements/signatures.md has the error beside that of the law.
    """
    law = progress_under(seen, cap)
    known = TenantEvidence(whole, 1.0, Prior(law, _LAW_ERROR), None, True, whole_mhz)
    [found] = attribute(seen, [known], seen_mhz, math.inf)
    return law if found.progress_ratio is None else found.progress_ratio
