"""The node's signatures (`gpushare.core.control.node_signatures`), on the GpuShares that have a pod here."""

import logging

from gpushare.core.control import NodeSignatures, ReadPod
from gpushare_deviceplugin.shares import NodeShares

_log = logging.getLogger(__name__)


class Signatures(NodeSignatures):
    """Signatures that this node knows; log what workloads are seen to do.

    Args:
        profiles: GpuShares' profiles by namespace/name, a live view.
    """

    def __init__(self, profiles: NodeShares) -> None:
        super().__init__(profiles.of, _log_it, profiles.joint)


def _log_it(pod: ReadPod, what: str) -> None:
    _log.info("workload %s %s", pod.workload, what, extra={"pod": pod.uid})
