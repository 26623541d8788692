"""Choose the cluster, send requests, and turn failures into one-sentence errors."""

import asyncio
import re
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import typer

from gpushare import __version__
from gpushare.cli.errors import (
    AbsentError,
    CommandError,
    ForbiddenError,
    OtherVersionError,
    UnreachableError,
    UsageError,
)
from gpushare.cli.last_reports import heard, silence_notes
from gpushare.core.api import MANAGED_SELECTOR, GpuNode, GpuShare, names
from gpushare.kube import (
    CONFIGMAPS,
    GPUNODES,
    GPUSHARES,
    PODS,
    Api,
    ApiError,
    Forbidden,
    Json,
    NotFound,
    Resource,
    Retryable,
    connect,
    current_namespace,
)

T = TypeVar("T")
_LABEL: Final = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")  # RFC 1123
SETTINGS_LABEL: Final = f"{names.GROUP}/settings=true"
VIEWER: Final = "gpushare-view"
"""The chart's ClusterRole for read access; it is aggregated into the cluster's own role `view`."""
EXPLAINER: Final = "gpushare-explain"
"""The chart's ClusterRole to read what decisions depend on, every namespace's pods too; aggregated nowhere."""
NO_GPUS: Final = (
    "no node has a GPU that gpushare manages: do the agent's pods run (kubectl get daemonsets -A -l "
    "app.kubernetes.io/part-of=gpushare), and are the GPU nodes labelled (docs/install.md)?"
)

NamespaceOption = Annotated[
    str | None, typer.Option("--namespace", "-n", help="only this namespace; default: all that you may read")
]
AllOption = Annotated[bool, typer.Option("--all-namespaces", "-A", help="every namespace")]
KubeconfigOption = Annotated[str | None, typer.Option(help="default: $KUBECONFIG or ~/.kube/config")]
ContextOption = Annotated[str | None, typer.Option(help="context of the kubeconfig")]


@dataclass(frozen=True, slots=True)
class Where:
    """The cluster and namespace of a command; None for the kubeconfig's own cluster, and for every namespace."""

    namespace: str | None = None
    kubeconfig: str | None = None
    context: str | None = None

    def connect(self) -> AbstractAsyncContextManager[Api]:
        """Connect to the cluster.

        Raises:
            UsageError: the namespace cannot be the name of one.
        """
        if self.namespace is not None and not _LABEL.fullmatch(self.namespace):
            raise UsageError(f'"{self.namespace}" is no name of a namespace')
        return connect(self.kubeconfig, context=self.context)

    def current_namespace(self) -> str:
        """Return the namespace that kubectl would use."""
        if self.namespace is not None:
            return self.namespace
        return current_namespace(self.kubeconfig, context=self.context)


@dataclass(frozen=True, slots=True)
class Seen:
    """The cluster's objects about pods that share GPUs.

    Attributes:
        pods: raw objects.
        nodes: empty if they may not be read.
        notes: sentences on what could not be read.
    """

    pods: tuple[Json, ...] = ()
    nodes: tuple[GpuNode, ...] = ()
    shares: tuple[GpuShare, ...] = ()
    notes: tuple[str, ...] = ()


def ask(where: Where, reader: Callable[[Api], Awaitable[T]], *, role: str = VIEWER, instead: str = "") -> T:
    """Read something from the cluster.

    Args:
        role: the ClusterRole that allows it.
        instead: option that can be used instead of a cluster, such as "--snapshot".

    Raises:
        CommandError: it cannot be read; the sentence says what to do.
    """

    async def asking() -> T:
        async with where.connect() as api:
            return await reader(api)

    try:
        return asyncio.run(asking())
    except ApiError as error:
        raise cluster_error(error, role=role, instead=instead) from error


def cluster_error(error: ApiError, *, role: str = VIEWER, instead: str = "") -> CommandError:
    """Return the command error, of the right kind, for an error of the Kubernetes API; see `ask`."""
    other = f", or give {instead}" if instead else ""
    match error:
        case Forbidden(status=401):
            return ForbiddenError(f"the cluster does not accept these credentials ({error}): log in again{other}")
        case Forbidden():
            return ForbiddenError(f"{error}: ask for the rights of the ClusterRole {role}{other}")
        case NotFound():
            return AbsentError(f"{error}{other}")
        case Retryable(status=0):
            other = f" Or give {instead}" if instead else ""
            return UnreachableError(f"{error}: is this the right cluster (--context), and is it up?{other}")
        case Retryable():
            return UnreachableError(f"the API server is in trouble: {error}; try again in a moment{other}")
    if not error.status:
        return UnreachableError(f"{error}: set KUBECONFIG, or give --kubeconfig or --context{other}")
    return CommandError(f"cannot read the cluster: {error}{other}")


async def see(api: Api, where: Where) -> Seen:
    """Read the pods, GpuNodes and GpuShares that the user may read.

    Raises:
        CommandError: the cluster has no gpushare, or another version.
        Forbidden: no namespace's pods may be read.
    """
    notes: list[str] = []
    namespace = where.namespace
    try:
        shares = await list_ours(api, GPUSHARES, GpuShare.from_object, namespace=namespace)
    except Forbidden as error:
        if namespace is None:
            namespace = where.current_namespace()
            notes.append(f"you may not read every namespace, so this is {namespace} alone (-n names another)")
        shares = await _allowed(api, GPUSHARES, GpuShare.from_object, notes, namespace, error)
    try:
        pods = (await api.list(PODS, _whole, namespace=namespace, label_selector=MANAGED_SELECTOR)).items
    except Forbidden:
        if namespace is not None:
            raise
        namespace = where.current_namespace()
        notes.append(
            f"you may not read the pods of every namespace, so this is {namespace} alone (-n names another)"
        )
        pods = (await api.list(PODS, _whole, namespace=namespace, label_selector=MANAGED_SELECTOR)).items
    try:
        now = time.time()
        nodes = (await api.list(GPUNODES, lambda obj: heard(GpuNode.from_object(obj), now))).items
        notes += silence_notes(nodes)
    except Forbidden:
        nodes = []
        notes.append(f"you may not read GpuNodes, so GPUs have no names here (ask for the ClusterRole {VIEWER})")
    return Seen(tuple(pods), tuple(nodes), tuple(shares), (*notes, *await version_notes(api)))


async def list_ours(
    api: Api, resource: Resource, reduce: Callable[[Json], T], *, namespace: str | None = None
) -> list[T]:
    """Read all objects of one of our own types.

    Raises:
        CommandError: the cluster has no gpushare, or another version.
        Forbidden: they may not be read.
    """
    try:
        return (await api.list(resource, reduce, namespace=namespace)).items
    except NotFound:
        raise await no_gpushare(api) from None
    except Forbidden:  # the server checks rights before it checks the type
        if names.VERSION not in await api.versions_of(names.GROUP):
            raise await no_gpushare(api) from None
        raise


async def no_gpushare(api: Api) -> CommandError:
    """Return why the cluster does not know our resource types: no gpushare, or another version of it."""
    versions = await api.versions_of(names.GROUP)
    if versions:
        return OtherVersionError(
            f"the cluster's gpushare speaks {', '.join(versions)} and this program {names.VERSION}: "
            "use the kubectl-gpushare of the same release"
        )
    return AbsentError(
        f"this cluster has no gpushare (no resource gpushares.{names.GROUP}): install the chart helm/gpushare, or "
        "choose another cluster with --context"
    )


async def version_notes(api: Api) -> tuple[str, ...]:
    """Return a sentence if the release is older or newer than this program; empty if that cannot be read."""
    try:
        found = await api.list(CONFIGMAPS, _version_of, label_selector=SETTINGS_LABEL)
    except ApiError:
        return ()
    others = sorted({version for version in found.items if version and version != __version__})
    if not others:
        return ()
    running = ", ".join(others)
    return (
        f"the cluster runs gpushare {running}, this program is {__version__}: a dash may be what it cannot tell",
    )


async def _allowed(
    api: Api, resource: Any, reduce: Callable[[Json], T], notes: list[str], namespace: str | None, error: ApiError
) -> list[T]:
    """Return the objects of one namespace, or none and a note."""
    try:
        return (await api.list(resource, reduce, namespace=namespace)).items
    except Forbidden:
        notes.append(f"{error} (ask for the ClusterRole {VIEWER})")
        return []


def _whole(obj: Json) -> Json:
    return obj


def _version_of(obj: Json) -> str:
    return str((obj["metadata"].get("labels") or {}).get("app.kubernetes.io/version") or "")
