"""The only place that talks to the Kubernetes API: raw JSON over the official client's transport.

async with connect() as api:
    pod = await api.get(PODS, "web-0", namespace="shop")
    async with Reflector(api, PODS, reduce_pod, label_selector="app=web", on_change=print) as pods:
        await pods.synced.wait()
"""

from gpushare.kube.api import (
    PAGE_LIMIT,
    Api,
    Json,
    Listing,
    Page,
    PatchType,
    WatchEvent,
    connect,
)
from gpushare.kube.bad_objects import BadObjects
from gpushare.kube.errors import (
    AlreadyExists,
    ApiError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Retryable,
)
from gpushare.kube.events import EventType, cut_note, object_reference, record_event
from gpushare.kube.kubeconfig import current_namespace, read_configuration
from gpushare.kube.reflector import Change, Reflector
from gpushare.kube.resources import (
    CONFIGMAPS,
    CORE_EVENTS,
    EVENTS,
    GPUNODES,
    GPUSHARES,
    LEASES,
    NAMESPACES,
    NODES,
    PODS,
    SECRETS,
    Resource,
)

__all__ = [
    "CONFIGMAPS",
    "CORE_EVENTS",
    "EVENTS",
    "GPUNODES",
    "GPUSHARES",
    "LEASES",
    "NAMESPACES",
    "NODES",
    "PAGE_LIMIT",
    "PODS",
    "SECRETS",
    "AlreadyExists",
    "Api",
    "ApiError",
    "BadObjects",
    "Change",
    "Conflict",
    "EventType",
    "Forbidden",
    "Gone",
    "Invalid",
    "Json",
    "Listing",
    "NotFound",
    "Page",
    "PatchType",
    "Reflector",
    "Resource",
    "Retryable",
    "WatchEvent",
    "connect",
    "current_namespace",
    "cut_note",
    "object_reference",
    "read_configuration",
    "record_event",
]
