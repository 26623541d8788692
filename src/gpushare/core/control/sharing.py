"""The tenants of one GPU in one window, as the agent infers their progress: signatures, caps, throttles."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from gpushare.core.api import WorkloadSignature
from gpushare.core.gpu import Counters, GpuSample
from gpushare.core.progress import (
    Attribution,
    PhasedAttribution,
    PhaseSearch,
    Prior,
    TenantEvidence,
    TenantLoad,
    attribute_phases,
    evidence,
    progress_alone,
)

# A tenant with less progress is asleep (it waits for requests or data, or has finished), unless the model expects
# so little. The slowest of four real programs that shared a GPU without caps made 0.16 (docs/facts.md 30).
ASLEEP_RATIO: Final = 0.05
STARVED_RATIO: Final = 0.15
# A window is decided by the counters if the inference's error is below this part of the prediction's, and small.
_DECISIVE: Final = 0.6
_MOST_ERROR: Final = 0.1
DUTY_SLACK: Final = 0.1  # a window of a second or two may cut a throttle's cycle


@dataclass(frozen=True, slots=True)
class SoloSignature:
    """Signature of a workload: its use alone at 100% threads.

    Attributes:
        cap_curve: measured progress alone by thread percentage.
        iterations_per_s: rate alone, if the workload reports one.
        sm_clock_mhz: mean SM clock during the measurement; None: unknown.
    """

    counters: Counters
    cap_curve: Mapping[int, float] = field(default_factory=dict)
    iterations_per_s: float | None = None
    sm_clock_mhz: float | None = None

    def load(self, threads: int) -> TenantLoad:
        """Return the workload under a cap, as input of the model."""
        return TenantLoad(
            self.counters,
            threads,
            self.cap_curve,
            iterations_per_s=self.iterations_per_s,
            sm_clock_mhz=self.sm_clock_mhz,
        )

    def alone_ratio(self, threads: float) -> float | None:
        """Return the progress alone under a cap, in percent of threads; None if the SM activity is not known."""
        if self.counters.sm_util is None:
            return None
        return min(1.0, progress_alone(self.counters, self.cap_curve, threads / 100))


@dataclass(frozen=True, slots=True)
class SharingTenant:
    """One active tenant of a GPU.

    Attributes:
        phases: its signatures, the usual work first; None for an unknown workload.
        threads: cap in force, percent.
        prior: what the model expects; None if it does not say.
        duty: part of the time in which it is not frozen.
    """

    phases: Sequence[SoloSignature | None]
    threads: int
    prior: Prior | None = None
    duty: float = 1.0

    def choices(self) -> list[TenantEvidence]:
        """Return the evidence for each of its phases."""
        return [_under(_evidence(phase, self.threads, self.prior), self.duty) for phase in self.phases]


def inferred(
    window: GpuSample,
    tenants: Sequence[SharingTenant],
    search: PhaseSearch | None = None,
    *,
    has_strangers: bool = False,
) -> PhasedAttribution:
    """Infer the progress of all active tenants of a GPU from one window.

    Args:
        search: state after the previous window of the same tenants, caps and signatures.
        has_strangers: whether somebody ran of whom nothing is known, who is then the last of the result.
    """
    strangers = [[TenantEvidence(None)]] if has_strangers else []
    choices = [*(tenant.choices() for tenant in tenants), *strangers]
    return attribute_phases(window.counters, choices, window.sm_clock_mhz, search, window.window_seconds)


def throttled_bound(bound: float, duty: float) -> float:
    """Return the most progress that a tenant under a cap can make while it runs only a part of the time."""
    return bound * min(1.0, duty + DUTY_SLACK) if duty < 1.0 else bound


def is_asleep(found: Attribution, prior: Prior | None) -> bool:
    """Return whether a tenant does nothing, and is not merely starved as the model expects."""
    if found.progress_ratio is None or found.progress_ratio >= ASLEEP_RATIO:
        return False
    return prior is None or prior.mean > STARVED_RATIO


def _under(proof: TenantEvidence, duty: float) -> TenantEvidence:
    return replace(proof, bound=throttled_bound(proof.bound, duty))


def _evidence(signature: SoloSignature | None, threads: int, prior: Prior | None) -> TenantEvidence:
    return TenantEvidence(None) if signature is None else evidence(signature.load(threads), prior)


class ReadPod(Protocol):
    """Part of a pod that its signature depends on."""

    @property
    def uid(self) -> str:
        """Return its uid."""
        ...

    @property
    def namespace(self) -> str:
        """Return its namespace."""
        ...

    @property
    def workload(self) -> str:
        """Return the key that links pods of one kind."""
        ...


class KeptProfile(Protocol):
    """Part of a GpuShare that signatures depend on."""

    @property
    def gpu_model(self) -> str:
        """Return the GPU model of its signature; "" without one, or for any."""
        ...

    @property
    def signature(self) -> SoloSignature | None:
        """Return its signature; None without a usable one."""
        ...

    @property
    def kept(self) -> WorkloadSignature | None:
        """Return the profile as it is written there."""
        ...

    @property
    def window_seconds(self) -> float | None:
        """Return how long its workload is to be measured alone; None where its user does not say."""
        ...


ProfilesOf = Callable[[str, str], Sequence[KeptProfile]]
"""Returns the profiles of a pod's GpuShares, by the pod's namespace and uid."""

JointOf = Callable[[ReadPod, str], KeptProfile | None]
"""Returns the profile of a pod's workload on a GPU model, where that is joined over namespaces; None otherwise."""


def is_decided(error: float, predicted_error: float | None) -> bool:
    """Return whether counters, not the prediction, decide what is inferred; None: no prediction."""
    return error <= (_MOST_ERROR if predicted_error is None else min(_MOST_ERROR, _DECISIVE * predicted_error))
