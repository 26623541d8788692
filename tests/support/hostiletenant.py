"""A root tenant's pod that does over the network what a test asks: calls to the API server, and floods.

Its own account may do with the pods and GpuShares of its namespace whatever RBAC can allow; a stolen token brings
what its owner may do.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hostilecaller
from livecluster import Namespace, wait_for

Json = dict[str, Any]
PROGRAM = Path(hostilecaller.__file__).read_text()
ACCOUNT = "hostile"
MERGE, STRATEGIC = "application/merge-patch+json", "application/strategic-merge-patch+json"
# More than the cluster's own role `edit`, so that what refuses is gpushare and not RBAC.
_RULES = [
    {
        "apiGroups": [""],
        "resources": [f"pods{part}" for part in ("", "/status", "/binding", "/ephemeralcontainers")],
    },
    {"apiGroups": [""], "resources": ["bindings"]},
    {"apiGroups": ["gpushare.io"], "resources": ["gpushares", "gpushares/status"]},
]


@dataclass(frozen=True)
class Said:
    """An answer of the API server; `message` is empty where nothing was refused."""

    code: int
    body: Json
    warnings: list[str]
    seconds: float

    @property
    def message(self) -> str:
        return str(self.body.get("message", ""))

    def refused(self, why: str, code: int = 403) -> None:
        """Hold it to a refusal in these words."""
        assert (self.code, why in self.message) == (code, True), (self.code, self.message or self.body)

    def accepted(self) -> Json:
        """Hold it to an accepted request; the object."""
        assert self.code in {200, 201}, (self.code, self.message)
        return self.body


class HostileTenant:
    """The pod, which runs from `start` on."""

    def __init__(self, space: Namespace, name: str) -> None:
        self.space = space
        self.name = name
        self.pods = f"/api/v1/namespaces/{space.name}/pods"
        self.shares = f"/apis/gpushare.io/v1alpha1/namespaces/{space.name}/gpushares"
        self.own = f"{self.pods}/{name}"

    @classmethod
    def start(cls, space: Namespace, pod: Json) -> "HostileTenant":
        """Create the pod with the program before its own command, as root and with its account's token."""
        rules = [{**rule, "verbs": ["*"]} for rule in _RULES]
        rbac = {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": ACCOUNT}}
        group = "rbac.authorization.k8s.io"
        space.create(
            {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}},
            {**rbac, "kind": "Role", "rules": rules},
            {
                **rbac,
                "kind": "RoleBinding",
                "roleRef": {"apiGroup": group, "kind": "Role", "name": ACCOUNT},
                "subjects": [{"kind": "ServiceAccount", "name": ACCOUNT, "namespace": space.name}],
            },
        )
        (container,) = pod["spec"]["containers"]
        container["command"] = ["python", "-c", PROGRAM, *container["command"]]
        pod["spec"] |= {"serviceAccountName": ACCOUNT, "automountServiceAccountToken": True}
        space.create(pod)
        tenant = cls(space, pod["metadata"]["name"])
        (running,) = space.running(tenant.name, seconds=180)
        assert running["spec"]["containers"][0]["securityContext"]["runAsUser"] == 0
        wait_for("the hostile tenant listening", tenant._listens)
        return tenant

    def call(self, method: str, path: str, body: object = None, **more: object) -> Said:
        """Ask the API server from within the pod; `more` is `content_type`, `token` or `headers`."""
        return Said(**self._does("call", method=method, path=path, body=body, **more))

    def merge(self, path: str, body: object) -> Said:
        """Change an object by a merge patch."""
        return self.call("PATCH", path, body, content_type=MERGE)

    def annotate(self, path: str, key: str, value: str | None) -> Said:
        """Set or remove an annotation."""
        return self.merge(path, {"metadata": {"annotations": {key: value}}})

    def hold(self, *addresses: tuple[str, int], count: int, says: str = "nothing") -> None:
        """Open so many connections to each address and keep them until `release`."""
        assert self._does("hold", addresses=addresses, count=count, says=says) == count * len(addresses)

    def open(self) -> int:
        """Return how many of the held connections the other sides have not closed."""
        return int(self._does("count")["open"])

    def release(self) -> tuple[int, int]:
        """Close what is held; how many connections the other sides had closed, and how many were open."""
        found = self._does("release")
        return found["closed"], found["open"]

    def loop(self, *addresses: tuple[str, int], count: int) -> None:
        """Post `{}` on so many connections to each address, again on each answer, until `end_loop`."""
        assert self._does("loop", addresses=addresses, count=count) == count * len(addresses)

    def end_loop(self) -> int:
        """End it; how many answers there were."""
        return int(self._does("end_loop"))

    def post(self, host: str, port: int, path: str, bodies: list[str]) -> list[int]:
        """Send these bodies by HTTPS; the statuses of the answers, 0 for none."""
        return list(self._does("post", host=host, port=port, path=path, bodies=bodies))

    def _does(self, attack: str, **arguments: object) -> Any:
        asked = json.dumps({"attack": attack, **arguments})
        proxy = f"{self.own}:{hostilecaller.PORT}/proxy/"
        return json.loads(self.space.cluster.kubectl("create", "--raw", proxy, "-f", "-", stdin=asked))

    def _listens(self) -> bool:
        asked = json.dumps({"attack": "release"})
        proxy = f"{self.own}:{hostilecaller.PORT}/proxy/"
        return self.space.cluster.try_kubectl("create", "--raw", proxy, "-f", "-", stdin=asked).code == 0
