"""Reads of the running cluster without a process for each: what tests wait for is asked several times a second."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from urllib.parse import urlencode

try:
    from kubernetes import config
    from kubernetes.config import ConfigException
    from urllib3.exceptions import HTTPError
except ModuleNotFoundError:  # a GPU machine has kubectl and no packages of Python (tests/gpu/README.md)
    HAS_PACKAGES = False
else:
    HAS_PACKAGES = True

Json = dict[str, Any]
_DISCOVERY = "application/json;g=apidiscovery.k8s.io;v=v2;as=APIGroupDiscoveryList"
_SECONDS = 60.0


@dataclass(frozen=True)
class Served:
    """One resource of the API server."""

    path: str
    api_version: str
    kind: str
    plural: str
    namespaced: bool


@dataclass(frozen=True)
class Read:
    """What `kubectl get` was asked, as far as it is understood here."""

    resource: str
    name: str
    namespace: str
    everywhere: bool
    query: str


def parsed(arguments: Sequence[str]) -> Read | None:
    """Return what arguments of `kubectl get` ask for; None where only kubectl can tell."""
    words, namespace, everywhere, query = [], "default", False, {}
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        option, equals, value = word.partition("=")
        if word in ("-A", "--all-namespaces"):
            everywhere = True
        elif option in ("-n", "--namespace", "-l", "--selector", "--field-selector"):
            if not equals:
                if not rest:
                    return None
                value = rest.pop(0)
            if option in ("-n", "--namespace"):
                namespace = value
            else:
                query["fieldSelector" if option == "--field-selector" else "labelSelector"] = value
        elif word.startswith("-"):
            return None
        else:
            words.append(word)
    if len(words) == 1:
        words = words[0].split("/")
    if not 1 <= len(words) <= 2 or any("," in word or "/" in word for word in words):
        return None
    name = words[1] if len(words) == 2 else ""
    return None if name and query else Read(words[0], name, namespace, everywhere, urlencode(query))


class LiveReads:
    """Answers as `kubectl get -o json` and `kubectl logs` do; None for all that is not an answer.

    Without the package kubernetes nothing is.
    """

    def __init__(self, kubeconfig: str) -> None:
        self._kubeconfig = kubeconfig
        self._served: dict[str, Served] = {}

    @cached_property
    def _client(self) -> Any:
        return config.new_client_from_config(self._kubeconfig)

    @cached_property
    def _headers(self) -> dict[str, str]:
        settings = self._client.configuration.auth_settings().values()
        return {auth["key"]: auth["value"] for auth in settings if auth["in"] == "header"}

    def get(self, arguments: Sequence[str]) -> Json | None:
        """Return an object, or a List; None: ask kubectl, which also says why."""
        read = parsed(arguments)
        served = self._find(read.resource) if read else None
        if read is None or served is None:
            return None
        space = f"/namespaces/{read.namespace}" if served.namespaced and not read.everywhere else ""
        path = f"{served.path}{space}/{served.plural}"
        found = self._ask(f"{path}/{read.name}" if read.name else f"{path}?{read.query}")
        if found is None:
            return None
        answer: Json = json.loads(found)
        if not read.name:
            shown = {"apiVersion": served.api_version, "kind": served.kind}
            items = [shown | item for item in answer["items"]]
            answer |= {"apiVersion": "v1", "kind": "List", "items": items}
        return answer

    def log(self, namespace: str, pod: str, *, tail: int | None = None) -> str | None:
        """Return the log of a pod's only container; None where there is none."""
        found = self._ask(
            f"/api/v1/namespaces/{namespace}/pods/{pod}/log" + (f"?tailLines={tail}" if tail is not None else "")
        )
        return None if found is None else found.decode(errors="replace")

    def _find(self, resource: str) -> Served | None:
        if resource not in self._served:
            self._discover()
        return self._served.get(resource)

    def _discover(self) -> None:
        for root in ("/apis", "/api"):  # of equal names the core's counts
            found = self._ask(root, _DISCOVERY)
            for group in reversed(json.loads(found).get("items", []) if found else []):
                name = group["metadata"].get("name", "")
                for version in reversed(group["versions"]):
                    self._take(name, version)

    def _take(self, group: str, version: Json) -> None:
        api_version = f"{group}/{version['version']}" if group else version["version"]
        for each in version["resources"]:
            served = Served(
                f"/apis/{api_version}" if group else f"/api/{api_version}",
                api_version,
                each["responseKind"]["kind"],
                each["resource"],
                each["scope"] == "Namespaced",
            )
            for alias in filter(
                None, (each["resource"], each.get("singularResource"), *each.get("shortNames", []))
            ):
                self._served |= {alias: served, f"{alias}.{group}": served}

    def _ask(self, path: str, accept: str = "application/json") -> bytes | None:
        if not HAS_PACKAGES:
            return None
        try:
            answer = self._client.rest_client.pool_manager.request(
                "GET",
                self._client.configuration.host + path,
                headers={**self._headers, "Accept": accept},
                timeout=_SECONDS,
                retries=1,
            )
        except (HTTPError, ConfigException):
            return None
        return bytes(answer.data) if answer.status == 200 else None
