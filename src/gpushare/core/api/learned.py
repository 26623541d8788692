"""Learned effects: how a workload deviates from the model's predictions when it runs beside others."""

from dataclasses import dataclass

from gpushare.core.api.schema import described


@dataclass(frozen=True, slots=True)
class LearnedEffect:
    """Effect of a workload and its neighbours on each other on one GPU model, relative to the predictions."""

    gpu_model: str = described("GPU model it was observed on.", default="", required=True, maxLength=128)
    sensitivity: float = described(
        "Logarithm of its measured over its predicted progress under a cap of half the threads (it counts for "
        "less under a milder cap, for more under a stricter one); below 0 it suffers more than predicted.",
        default=0.0,
        required=True,
    )
    pressure: float = described(
        "Logarithm of its neighbours' measured over their predicted progress; below 0 it hurts them more than "
        "predicted.",
        default=0.0,
        required=True,
    )
    windows: int = described("Number of windows that it was learnt from.", default=0, required=True, minimum=0)
    deviation: float | None = described(
        "Standard deviation of the logarithm that the effects leave unexplained.", default=None, minimum=0
    )
    sensitivity_error: float | None = described("Standard error of the sensitivity.", default=None, minimum=0)
    pressure_error: float | None = described("Standard error of the pressure.", default=None, minimum=0)
