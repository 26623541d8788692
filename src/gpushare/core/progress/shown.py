"""Progress of a workload alone under a cap, from its counters there and with all threads.

Work per unit of progress hardly depends on the cap, so the ratio of the counters under the cap to those with all
threads is the progress. Where the counters say little, the law for counters under a cap alone
(`alone.progress_under`) decides.
"""

import math
from typing import Final

from gpushare.core.gpu import Counters
from gpushare.core.progress.alone import progress_under
from gpushare.core.progress.attribution import Prior, TenantEvidence, attribute

_LAW_ERROR: Final = 0.12  # of `progress_under` on unseen programs (docs/measurements/signatures.md)


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
        whole: counters alone with all threads.
        seen: counters alone under the cap.
        whole_mhz: mean SM clock while `whole` was measured; None if unknown.
        seen_mhz: mean SM clock while `seen` was measured; None if unknown.

    Source: docs/measurements/signatures.md has its error and that of the law.
    """
    law = progress_under(seen, cap)
    known = TenantEvidence(whole, 1.0, Prior(law, _LAW_ERROR), None, True, whole_mhz)
    [found] = attribute(seen, [known], seen_mhz, math.inf)
    return law if found.progress_ratio is None else found.progress_ratio
