"""The wire types of k8s.io/kube-scheduler/extender/v1, with Go field names, as its structs have no JSON tags."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from gpushare.core.api import PodView
from gpushare.core.placement import NodeList

_NAMES: Final = b'"NodeNames":['  # the last field of ExtenderArgs; in a JSON string its quotes would be escaped
MAX_KEPT_LISTS: Final = 8  # cached lists of names, up to some hundred kB each


class BadRequest(Exception):  # noqa: N818 - it is one, in HTTP's words
    """The body is not what kube-scheduler sends; the message says why."""


@dataclass(frozen=True, slots=True)
class FilterArgs:
    """ExtenderArgs of filter and prioritize.

    Attributes:
        nodes: NodeList items if kube-scheduler sends whole nodes (nodeCacheCapable false); else None.
    """

    pod: PodView
    node_list: NodeList
    nodes: Sequence[Mapping[str, Any]] | None
    names_json: bytes | None = None
    """The unparsed JSON list of names, if the request had one."""

    @property
    def node_names(self) -> Sequence[str]:
        """Return the names of the nodes to choose among."""
        return self.node_list.names


@dataclass(frozen=True, slots=True)
class BindArgs:
    """ExtenderBindingArgs."""

    pod_name: str
    pod_namespace: str
    pod_uid: str
    node: str

    @property
    def key(self) -> str:
        """Return "namespace/name"."""
        return f"{self.pod_namespace}/{self.pod_name}"


@dataclass(frozen=True, slots=True)
class Victims:
    """MetaVictims: uids of the pods to evict from a node."""

    pod_uids: tuple[str, ...]
    pdb_violations: int


@dataclass(frozen=True, slots=True)
class PreemptArgs:
    """ExtenderPreemptionArgs."""

    pod: PodView
    victims: Mapping[str, Victims]


class FilterReader:
    """Reader of ExtenderArgs that parses a list of names once, however often it is sent.

    kube-scheduler sends prioritize the names that filter returned, and often sends filter the same names for many
    pods. Comparing a hundred kB takes microseconds, parsing them again takes milliseconds. The last pod is kept
    too, since prioritize gets the one that filter got.
    """

    def __init__(self) -> None:
        # Not an LRUCache, whose key would be the list: 108 kB (3,000 names) are copied and hashed in 128 us, but
        # compared with a list of the same length in 18 us (timeit, 2026-11-24).
        self._lists: OrderedDict[int, tuple[bytes, NodeList]] = OrderedDict()
        self._next = 0
        self._last: tuple[bytes, PodView] | None = None

    def read(self, body: bytes) -> FilterArgs:
        """Parse ExtenderArgs, with names or with whole nodes."""
        at = body.rfind(_NAMES)
        if at < 0 or not body.endswith(b"]}"):
            return read_filter_args(body)
        start = at + len(_NAMES) - 1
        known = self._find(body, start)
        if known is None:
            raw = body[start:-1]
            try:
                known = raw, NodeList(orjson.loads(raw))
            except orjson.JSONDecodeError:  # fields after the names, or no JSON: parse the whole body
                return read_filter_args(body)
            self.remember(*known)
        raw, names = known
        before = body[:start]
        if self._last is not None and self._last[0] == before:
            return FilterArgs(self._last[1], names, None, raw)
        try:
            pod = PodView.from_object(_object(before + b"null}")["Pod"])
            self._last = before, pod
            return FilterArgs(pod, names, None, raw)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise BadRequest(f"not ExtenderArgs: {error!r}") from error

    def remember(self, raw: bytes, names: NodeList) -> None:
        """Use `names` from now on for requests that contain `raw`, a JSON list."""
        self._lists[self._next] = (raw, names)
        self._next += 1
        if len(self._lists) > MAX_KEPT_LISTS:
            self._lists.popitem(last=False)

    def _find(self, body: bytes, start: int) -> tuple[bytes, NodeList] | None:
        size = len(body) - 1 - start
        for key, (raw, names) in self._lists.items():
            if len(raw) == size and body.startswith(raw, start):
                self._lists.move_to_end(key)
                return raw, names
        return None


def read_filter_args(body: bytes) -> FilterArgs:
    """Parse ExtenderArgs, with names or with whole nodes."""
    args = _object(body)
    try:
        pod = PodView.from_object(args["Pod"])
        node_names = args.get("NodeNames")
        if node_names is not None:
            return FilterArgs(pod, NodeList(node_names), None)
        nodes = (args.get("Nodes") or {}).get("items") or []
        return FilterArgs(pod, NodeList([node["metadata"]["name"] for node in nodes]), nodes)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadRequest(f"not ExtenderArgs: {error!r}") from error


def read_bind_args(body: bytes) -> BindArgs:
    """Parse ExtenderBindingArgs."""
    args = _object(body)
    try:
        return BindArgs(args["PodName"], args["PodNamespace"], args["PodUID"], args["Node"])
    except KeyError as error:
        raise BadRequest(f"not ExtenderBindingArgs: {error} is missing") from error


def read_preempt_args(body: bytes) -> PreemptArgs:
    """Parse ExtenderPreemptionArgs, with victims by uid or as whole pods."""
    args = _object(body)
    try:
        by_uid = args.get("NodeNameToMetaVictims")
        if by_uid is not None:
            victims = {
                node: Victims(
                    tuple(pod["UID"] for pod in each.get("Pods") or ()), each.get("NumPDBViolations") or 0
                )
                for node, each in by_uid.items()
            }
        else:
            victims = {
                node: Victims(
                    tuple(pod["metadata"]["uid"] for pod in each.get("Pods") or ()),
                    each.get("NumPDBViolations") or 0,
                )
                for node, each in (args.get("NodeNameToVictims") or {}).items()
            }
        return PreemptArgs(PodView.from_object(args["Pod"]), victims)
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise BadRequest(f"not ExtenderPreemptionArgs: {error!r}") from error


def filter_result(
    args: FilterArgs, fitting: Sequence[str], failed: Mapping[str, str], unresolvable: Mapping[str, str]
) -> bytes:
    """Return an ExtenderFilterResult in the form of the request: names for names, nodes for nodes."""
    kept: Any = None
    if args.nodes is not None:
        chosen = set(fitting)
        kept = {"items": [node for node in args.nodes if node["metadata"]["name"] in chosen]}
    return orjson.dumps(
        {
            "Nodes": kept,
            "NodeNames": fitting if args.nodes is None else None,
            "FailedNodes": failed,
            "FailedAndUnresolvableNodes": unresolvable,
            "Error": "",
        }
    )


def filter_names_result(fitting: bytes, failed: bytes, unresolvable: bytes) -> bytes:
    """Return an ExtenderFilterResult of names, given the inside of its JSON list and of its JSON objects."""
    return b"".join(
        (
            b'{"Nodes":null,"NodeNames":[',
            fitting,
            b'],"FailedNodes":{',
            failed,
            b'},"FailedAndUnresolvableNodes":{',
            unresolvable,
            b'},"Error":""}',
        )
    )


def filter_error(message: str) -> bytes:
    """Return an ExtenderFilterResult that contains only an error; kube-scheduler retries the pod."""
    return orjson.dumps(
        {
            "Nodes": None,
            "NodeNames": None,
            "FailedNodes": None,
            "FailedAndUnresolvableNodes": None,
            "Error": plain(message),
        }
    )


def bind_result(error: str) -> bytes:
    """Return an ExtenderBindingResult."""
    return orjson.dumps({"Error": plain(error)})


def plain(sentence: str) -> str:
    """Return the sentence without "%", because kube-scheduler uses our answer as a format string of its events."""
    return sentence.replace("%", " percent")


def preempt_result(victims: Mapping[str, Victims]) -> bytes:
    """Return an ExtenderPreemptionResult."""
    return orjson.dumps(
        {
            "NodeNameToMetaVictims": {
                node: {"Pods": [{"UID": uid} for uid in each.pod_uids], "NumPDBViolations": each.pdb_violations}
                for node, each in victims.items()
            }
        }
    )


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise BadRequest(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise BadRequest("not a JSON object")
    return value
