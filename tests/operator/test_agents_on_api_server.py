"""What a stolen agent token reads, on a real API server that was told what docs/install.md says."""

import json
import re
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from livecluster import wait_for
from tests.operator.conftest import ApiServer
from tests.operator.test_webhooks_on_api_server import ROOT, rendered

pytestmark = pytest.mark.integration

Json = dict[str, Any]
NAMESPACE, AGENT, OTHER = "gpushare", "gpushare-agent", "other"  # as `rendered` names them
REFUSED = 500  # the API server's word for an authorizer that cannot be asked; of RBAC's it would be 403
RBAC = "/apis/rbac.authorization.k8s.io/v1"


class Caller:
    """Calls an API server with a token."""

    def __init__(self, server: ApiServer, token: str = "t0ken") -> None:
        self._url = yaml.safe_load(server.kubeconfig.read_text())["clusters"][0]["cluster"]["server"]
        self._token = token

    def call(self, method: str, path: str, body: Json | None = None, **query: str) -> tuple[int, Json]:
        """The status, and the object; of a watch, nothing."""
        url = f"{self._url}{path}?{urllib.parse.urlencode(query)}"
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"}
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, context=ssl._create_unverified_context(), timeout=60) as answer:
                text = answer.read()
                return answer.status, {} if "watch" in query else json.loads(text)
        except urllib.error.HTTPError as error:
            return error.code, {}

    def lists(self, selector: str = "", path: str = "/api/v1/pods", **query: str) -> int:
        """The status of a list of pods."""
        return self.call("GET", path, **({"fieldSelector": selector} if selector else {}), **query)[0]


def configuration(folder: Path) -> Path:
    """The page's AuthorizationConfiguration, for the rendered release, with its kubeconfig in a folder."""
    page = (ROOT / "docs" / "install.md").read_text()
    [text] = [block for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "AuthorizationConf" in block]
    nobody = {"clusters": [{"name": "nobody", "cluster": {"server": "https://127.0.0.1:1"}}], "users": []}
    nobody |= {"contexts": [{"name": "it", "context": {"cluster": "nobody", "user": ""}}], "current-context": "it"}
    (folder / "nobody.kubeconfig").write_text(yaml.safe_dump({"apiVersion": "v1", "kind": "Config", **nobody}))
    assert "/etc/kubernetes/nobody.kubeconfig" in text
    text = text.replace("/etc/kubernetes/nobody.kubeconfig", str(folder / "nobody.kubeconfig"))
    file = folder / "authorization.yaml"
    file.write_text(text.replace("gpushare-system", NAMESPACE))
    return file


def test_an_agent_lists_the_pods_of_its_own_node_only(
    authorizing_server: Callable[[Path], ApiServer], tmp_path: Path
) -> None:
    server = authorizing_server(configuration(tmp_path))
    admin = Caller(server)
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}}
    assert admin.call("POST", "/api/v1/namespaces", space)[0] == 201
    for item in rendered("rbac/agent.yaml", ("ClusterRole", "ClusterRoleBinding")):
        for subject in item.get("subjects", [])[:1]:
            item["subjects"].append({**subject, "name": OTHER})
        assert admin.call("POST", f"{RBAC}/{item['kind'].lower()}s", item)[0] == 201
    uids = {}
    for name in ("n1", "n2"):
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
        status, made = admin.call("POST", "/api/v1/nodes", node)
        assert status == 201
        uids[name] = made["metadata"]["uid"]

    def token(account: str, node: str | None) -> Caller:
        accounts = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts"
        admin.call("POST", accounts, {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": account}})
        bound = {"apiVersion": "v1", "kind": "Node", "name": node, "uid": uids[node]} if node else None
        request = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        status, made = admin.call("POST", f"{accounts}/{account}/token", request)
        assert status == 201, made
        return Caller(server, made["status"]["token"])

    agent = token(AGENT, "n1")
    wait_for("the binding in effect", lambda: agent.lists("spec.nodeName=n1") == 200)
    assert agent.lists("spec.nodeName=n1", labelSelector="gpushare.io/managed=true") == 200
    assert agent.lists("spec.nodeName=n1,status.phase=Running") == 200
    assert agent.lists("spec.nodeName=n1", watch="true", timeoutSeconds="1") == 200
    for selector in ("", "spec.nodeName=n2", "spec.nodeName!=n2", "spec.nodeName=", "metadata.name=web"):
        assert agent.lists(selector) == REFUSED, selector
        assert agent.lists(selector, watch="true", timeoutSeconds="1") == REFUSED, selector
    assert agent.lists(path="/api/v1/namespaces/default/pods") == REFUSED
    assert agent.lists("spec.nodeName=n1", path="/api/v1/namespaces/default/pods") == 200
    assert token(AGENT, None).lists("spec.nodeName=n1") == REFUSED, "a token that names no node"
    assert token(AGENT, "n2").lists("spec.nodeName=n1") == REFUSED
    assert token(OTHER, "n1").lists() == 200, "RBAC alone grants it: the authorizer is what denies it to agents"
    assert admin.lists() == 200
    assert agent.call("GET", "/apis/gpushare.io/v1alpha1/gpushares")[0] != 403, "the rest is RBAC's"
