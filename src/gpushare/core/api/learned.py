"""What was learnt of a workload beside others."""

from dataclasses import dataclass

from gpushare.core.api.schema import described


@dataclass(frozen=True, slots=True)
class LearnedEffect:
    """What was seen of the workload beside others on one GPU model, beyond what the model predicts."""

    gpu_model: str = described("GPU model it was seen on.", default="", required=True, maxLength=128)
    sensitivity: float = described(
        "Logarithm of its progress over the predicted one, under a cap of half the threads (less counts under a "
        "milder cap, more under a stricter one); below 0 it suffers more than predicted.",
        default=0.0,
        required=True,
    )
    pressure: float = described(
        "Logarithm of its neighbours' progress over the predicted one; below 0 it hurts more than predicted.",
        default=0.0,
        required=True,
    )
    windows: int = described("Windows that it was learnt from.", default=0, required=True, minimum=0)
    deviation: float | None = described(
        "Standard deviation of what the effects leave unexplained, of the logarithm.", default=None, minimum=0
    )
    sensitivity_error: float | None = described("Standard error of the sensitivity.", default=None, minimum=0)
    pressure_error: float | None = described("Standard error of the pressure.", default=None, minimum=0)
