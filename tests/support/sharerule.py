"""The rule by which a GpuShare speaks for a pod, as its documentation says it: slow, and easy to believe."""

from collections.abc import Iterable, Mapping

from gpushare.core.api import GpuShare


def share_of(labels: Mapping[str, str], owner_uids: Iterable[str], shares: Iterable[GpuShare]) -> GpuShare | None:
    """Of the GpuShares of one namespace: the first by name that selects the pod, else the first of its owners."""
    owners = set(owner_uids)
    by_name = sorted(shares, key=lambda one: one.name)
    selecting = [one for one in by_name if one.spec.selector is not None and one.spec.selector.matches(labels)]
    made = [one for one in by_name if one.spec.selector is None and any(o.uid in owners for o in one.owners)]
    return next(iter(selecting + made), None)
