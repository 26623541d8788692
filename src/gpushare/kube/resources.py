"""The resource types that gpushare reads and writes, and their paths."""

from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from gpushare.core.api import names
from gpushare.kube.errors import NotFound

_NO_NAMES: Final = frozenset({"", ".", ".."})
_IN_NO_NAME: Final = "/%"  # the API server takes no object with such a name, but an owner reference may have any


@dataclass(frozen=True, slots=True)
class Resource:
    """One resource type of the API; `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str
    namespaced: bool

    @property
    def api_version(self) -> str:
        """Return the apiVersion of such an object."""
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(
        self, *, namespace: str | None = None, name: str | None = None, subresource: str | None = None
    ) -> str:
        """Return the URL path; without a namespace, a namespaced type's path covers all of them (lists only).

        Raises:
            NotFound: no object can have the name. In the path it would name a list, or another type's object.
        """
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        parts = [root]
        if self.namespaced and namespace is not None:
            parts += ["namespaces", quote(namespace, safe="")]
        elif self.namespaced and name is not None:
            raise ValueError(f"{self.plural} are namespaced: give the namespace of {name}")
        parts.append(self.plural)
        if name is not None:
            if name in _NO_NAMES or any(each in name for each in _IN_NO_NAME):
                raise NotFound(f"no {self.kind} can have the name {name!r}")
            parts.append(quote(name, safe=""))
        if subresource is not None:
            parts.append(subresource)
        return "/".join(parts)


PODS: Final = Resource("", "v1", "pods", "Pod", namespaced=True)
NODES: Final = Resource("", "v1", "nodes", "Node", namespaced=False)
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace", namespaced=False)
CONFIGMAPS: Final = Resource("", "v1", "configmaps", "ConfigMap", namespaced=True)
SECRETS: Final = Resource("", "v1", "secrets", "Secret", namespaced=True)
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event", namespaced=True)
CORE_EVENTS: Final = Resource("", "v1", "events", "Event", namespaced=True)
"""The same events in the core group; the cluster's own role `view` allows to read them only there."""
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease", namespaced=True)
GPUNODES: Final = Resource(names.GROUP, names.VERSION, "gpunodes", "GpuNode", namespaced=False)
GPUSHARES: Final = Resource(names.GROUP, names.VERSION, "gpushares", "GpuShare", namespaced=True)
