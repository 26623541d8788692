"""The interference model as attribution's prior: each tenant's expected progress before counters are read."""

from collections.abc import Sequence
from typing import Final

from gpushare.core.interference.model import InterferenceModel
from gpushare.core.interference.profile import Profile
from gpushare.core.progress import Predict, Prior, TenantLoad

_INTERVAL_IN_ERRORS: Final = 2 * 1.645  # width of a normal distribution's 90% interval, in standard deviations
_MIN_ERROR: Final = 0.02  # no model is more exact than the rates that it was fitted to


def expectation(model: InterferenceModel) -> Predict:
    """Wrap a model as `attribution.Predict`; it returns None for signatures that lack what the model needs."""

    def predict(loads: Sequence[TenantLoad]) -> Sequence[Prior | None]:
        if any(load.signature.sm_util is None for load in loads):
            return [None] * len(loads)
        tenants = [
            (
                Profile(load.signature, load.iterations_per_s, cap_curve=load.cap_curve, capped=load.capped),
                load.thread_percentage,
            )
            for load in loads
        ]
        return [
            Prior(forecast.progress, max(_MIN_ERROR, (forecast.upper - forecast.lower) / _INTERVAL_IN_ERRORS))
            for forecast in model.predict(tenants)
        ]

    return predict
