"""The node's managed pods, reduced from the API's JSON to what the agent needs."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpushare.core.api import names
from gpushare.core.api.decision import Decision
from gpushare.core.api.quantity import parse_count
from gpushare.core.api.rejection import Rejection
from gpushare.core.api.request import JobClass, parse_class

_TERMINAL_PHASES: Final = frozenset({"Succeeded", "Failed"})


@dataclass(frozen=True, slots=True)
class ManagedPod:
    """One pod of this node that carries our label.

    Attributes:
        share_units: what it asks of `gpushare.io/share`, 100 a GPU.
        decision: where it was decided to run; None before the decision, or when its annotations are broken.
        problem: what is wrong with its annotations, a sentence; empty when nothing is.
        workload: key that links pods of one kind.
    """

    uid: str
    namespace: str
    name: str
    phase: str
    share_units: int
    decision: Decision | None
    problem: str
    job_class: JobClass
    workload: str

    @property
    def key(self) -> str:
        """Namespace and name, as PodResources names pods."""
        return f"{self.namespace}/{self.name}"

    @property
    def is_over(self) -> bool:
        """Whether its containers have ended for good, so that it holds no share any more."""
        return self.phase in _TERMINAL_PHASES


def reduce_pod(obj: Mapping[str, Any]) -> ManagedPod:
    """One raw pod to a `ManagedPod`; broken annotations become its `problem`."""
    metadata = obj["metadata"]
    annotations: Mapping[str, str] = metadata.get("annotations") or {}
    decision: Decision | None = None
    problem = ""
    try:
        decision = Decision.from_annotations(annotations)
    except ValueError as error:
        problem = str(error)
    job_class = parse_class(annotations.get(names.CLASS, JobClass.THROUGHPUT.value))
    if isinstance(job_class, Rejection):
        problem = problem or str(job_class)
        job_class = JobClass.THROUGHPUT
    return ManagedPod(
        uid=metadata["uid"],
        namespace=metadata["namespace"],
        name=metadata["name"],
        phase=(obj.get("status") or {}).get("phase", ""),
        share_units=_share_units(obj.get("spec") or {}),
        decision=decision,
        problem=problem,
        job_class=job_class,
        workload=_workload(metadata, annotations),
    )


def _share_units(spec: Mapping[str, Any]) -> int:
    """The pod's limit of our resource; an init container's counts like kubelet counts it, by the larger."""

    def units(containers: Any) -> list[int]:
        limits = [(c.get("resources") or {}).get("limits") or {} for c in containers or ()]
        return [parse_count(limit.get(names.SHARE_RESOURCE, 0)) for limit in limits]

    return max([sum(units(spec.get("containers"))), *units(spec.get("initContainers"))])


def _workload(metadata: Mapping[str, Any], annotations: Mapping[str, str]) -> str:
    if key := annotations.get(names.WORKLOAD):
        return key
    owners = metadata.get("ownerReferences") or ()
    owner = next((o for o in owners if o.get("controller")), None)
    return f"{metadata['namespace']}/{owner['kind']}/{owner['name']}" if owner else f"pod/{metadata['uid']}"
