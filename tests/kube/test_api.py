"""The client against real HTTP: paths, bodies, errors."""

import asyncio
import json
import re
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from certificates import make_pair

from gpushare.kube import (
    GPUNODES,
    PODS,
    AlreadyExists,
    Api,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    PatchType,
    Retryable,
    connect,
    record_event,
)
from gpushare.kube.transport import Configuration, kube_config


async def test_a_list_is_taken_in_pages_and_reduced(api, server):
    server.objects = [{"metadata": {"name": f"p{i}"}} for i in range(1203)]
    listing = await api.list(PODS, lambda pod: pod["metadata"]["name"], label_selector="a=b")
    assert listing.items == [f"p{i}" for i in range(1203)]
    assert listing.resource_version == "100"
    assert [query.get("continue") for _, _, query, _, _ in server.requests] == [None, "500", "1000"]
    assert all(query["labelSelector"] == "a=b" for _, _, query, _, _ in server.requests)


async def test_a_lapsed_continue_token_lists_anew_in_one_piece(api, server):
    server.objects = [{"metadata": {"name": f"p{i}"}} for i in range(700)]
    pages = api.pages(PODS)
    await anext(pages)
    server.failures = []
    original = server.list

    def list_once_gone(request):
        if request.query.get("continue"):
            server.failures.clear()
            return __import__("aiohttp").web.json_response({"reason": "Expired"}, status=410)
        return original(request)

    server.list = list_once_gone
    listing = await api.list(PODS, lambda pod: pod["metadata"]["name"])
    assert len(listing.items) == 700
    assert "limit" not in server.requests[-1][2]


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (403, "Forbidden", Forbidden),
        (401, "Unauthorized", Forbidden),
        (422, "Invalid", Invalid),
        (400, "BadRequest", Invalid),
        (429, "TooManyRequests", Retryable),
        (500, "InternalError", Retryable),
        (503, "ServiceUnavailable", Retryable),
    ],
)
async def test_errors_are_mapped_once(api, server, status, reason, kind):
    server.failures = [(status, {"reason": reason, "message": "no"}, {})]
    with pytest.raises(kind) as caught:
        await api.get(PODS, "p", namespace="n")
    assert (caught.value.status, caught.value.reason, str(caught.value)) == (status, reason, "no")


async def test_the_causes_of_a_refusal_are_known(api, server):
    causes = [{"reason": "DisruptionBudget", "message": "The budget web needs 1 healthy pods"}, "of a proxy"]
    server.failures = [(429, {"reason": "TooManyRequests", "details": {"causes": causes}}, {}), (403, {}, {})]
    with pytest.raises(Retryable) as caught:
        await api.evict("p", namespace="n")
    assert caught.value.causes == {"DisruptionBudget"}
    with pytest.raises(Forbidden) as refused:
        await api.evict("p", namespace="n")
    assert refused.value.causes == frozenset()


async def test_retry_after_is_taken_from_the_header_or_the_status(api, server):
    server.failures = [(429, {}, {"Retry-After": "7"}), (503, {"details": {"retryAfterSeconds": 3}}, {})]
    with pytest.raises(Retryable) as caught:
        await api.get(PODS, "p", namespace="n")
    assert caught.value.retry_after_seconds == 7
    with pytest.raises(Retryable) as caught:
        await api.get(PODS, "p", namespace="n")
    assert caught.value.retry_after_seconds == 3


async def test_a_server_that_is_away_is_retryable(api, server):
    api._configuration.host = "http://127.0.0.1:1"
    with pytest.raises(Retryable, match="did not answer"):
        await api.get(PODS, "p", namespace="n")


async def test_a_page_that_is_no_api_servers_says_so(api, server):
    server.list = lambda _: web.Response(text="<html>log in</html>", content_type="text/html")
    with pytest.raises(Retryable, match="what answers is no API server"):
        await api.list(PODS, lambda pod: pod)


@pytest.mark.parametrize("text", ["null", "[]", "3", '{"message": "down for maintenance"}', '{"items": 3}'])
async def test_an_answer_that_is_no_list_is_never_an_empty_one(api, server, text):
    """Before: whoever listed the pods of a cluster behind such a proxy held that all of them were gone."""
    server.list = lambda _: web.Response(text=text, content_type="application/json")
    with pytest.raises(Retryable, match="what answers is no API server"):
        await api.list(PODS, lambda pod: pod)


@pytest.mark.parametrize("item", ["3", "null", "[]", "{}", '{"metadata": 3}', '{"metadata": {"name": 3}}'])
async def test_an_item_that_is_no_object_is_no_api_servers(api, server, item):
    server.list = lambda _: web.Response(text=f'{{"items": [{item}]}}', content_type="application/json")
    with pytest.raises(Retryable, match="a list whose items are no objects with a name"):
        await api.list(PODS, lambda pod: pod)


async def test_a_list_whose_items_are_null_is_empty(api, server):
    """As aggregated API servers write it."""
    server.list = lambda _: web.Response(text='{"metadata": {}, "items": null}', content_type="application/json")
    assert (await api.list(PODS, lambda pod: pod)).items == []


async def test_a_refusal_in_plain_text_is_one_line(api, server):
    """As a path of no API is answered; tests/cli/test_explain_on_api_server.py has it from a real server."""
    server.list = lambda _: web.Response(text="404 page not found\n", status=404)
    with pytest.raises(NotFound) as caught:
        await api.list(PODS, lambda pod: pod)
    assert str(caught.value) == "404 page not found"


async def test_patch_kinds_and_subresources(api, server):
    await api.patch(PODS, "p", {"metadata": {"labels": {"a": "b"}}}, namespace="n")
    await api.patch(PODS, "p", [{"op": "remove", "path": "/a"}], namespace="n", patch_type=PatchType.JSON)
    await api.patch(GPUNODES, "g", {"status": {}}, subresource="status")
    await api.apply(GPUNODES, {"metadata": {"name": "g"}, "spec": {}})
    seen = [(method, path, kind) for method, path, _, kind, _ in server.requests]
    assert seen == [
        ("PATCH", "/api/v1/namespaces/n/pods/p", "application/merge-patch+json"),
        ("PATCH", "/api/v1/namespaces/n/pods/p", "application/json-patch+json"),
        ("PATCH", "/apis/gpushare.io/v1alpha1/gpunodes/g/status", "application/merge-patch+json"),
        ("PATCH", "/apis/gpushare.io/v1alpha1/gpunodes/g", "application/apply-patch+yaml"),
    ]
    assert server.requests[1][4] == [{"op": "remove", "path": "/a"}]
    assert server.requests[3][2] == {"fieldManager": "gpushare", "force": "true"}


async def test_bind_carries_uid_and_annotations(api, server):
    await api.bind("p", "node-1", namespace="n", uid="u1", annotations={"gpushare.io/gpu": "GPU-1"})
    method, path, _, _, body = server.requests[0]
    assert (method, path) == ("POST", "/api/v1/namespaces/n/pods/p/binding")
    assert body == {
        "apiVersion": "v1",
        "kind": "Binding",
        "metadata": {
            "name": "p",
            "namespace": "n",
            "uid": "u1",
            "annotations": {"gpushare.io/gpu": "GPU-1"},
        },
        "target": {"apiVersion": "v1", "kind": "Node", "name": "node-1"},
    }


async def test_evict_and_delete_name_the_very_pod(api, server):
    await api.evict("p", namespace="n", uid="u1")
    await api.delete(PODS, "p", namespace="n", uid="u1", grace_seconds=0)
    assert server.requests[0][1] == "/api/v1/namespaces/n/pods/p/eviction"
    assert server.requests[0][4]["deleteOptions"]["preconditions"] == {"uid": "u1"}
    assert server.requests[1][4]["gracePeriodSeconds"] == 0


async def test_an_event_names_its_object_and_never_raises(api, server, caplog):
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p", "namespace": "n", "uid": "u1"}}
    await record_event(api, pod, reason="ClientsAtLimit", note="x" * 2000, action="Hold")
    _, path, _, _, body = server.requests[0]
    assert path == "/apis/events.k8s.io/v1/namespaces/n/events"
    assert body["regarding"] == {"apiVersion": "v1", "kind": "Pod", "name": "p", "namespace": "n", "uid": "u1"}
    assert body["note"] == "x" * 1024
    server.failures = [(403, {"message": "no events for you"}, {})]
    await record_event(api, pod, reason="ClientsAtLimit", note="x", action="Hold")
    assert "no events for you" in caplog.text


async def test_an_events_note_is_cut_by_bytes_as_the_api_server_counts_them(api, server):
    """Before: 1000 characters, up to 4000 bytes, which the API server refuses, so that there was no event."""
    await record_event(api, {"kind": "Pod", "name": "p"}, reason="R", note="ä" * 2000, action="A")
    await record_event(api, {"kind": "Pod", "name": "p"}, reason="R", note="a" + "ä" * 2000, action="A")
    assert [body["note"] for *_, body in server.requests] == ["ä" * 512, "a" + "ä" * 511]


@pytest.mark.parametrize("end", ["-", ".", ".-", "a"])
async def test_an_event_has_a_valid_name_wherever_its_objects_name_is_cut(api, server, end):
    """Before: "...-.0123456789abcdef", which the API server refuses, so that there was no event."""
    name = f"{'p' * (200 - len(end))}{end}{'q' * 40}"
    await record_event(api, {"kind": "Pod", "name": name, "namespace": "n"}, reason="R", note="x", action="A")
    *_, body = server.requests[0]
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    assert re.fullmatch(rf"{label}(\.{label})*", body["metadata"]["name"])
    assert body["regarding"]["name"] == name


async def test_the_token_is_sent_and_a_missing_kubeconfig_is_one_sentence(api, server, tmp_path):
    seen = {}

    def look(request):
        seen.update(request.headers)
        return __import__("aiohttp").web.json_response({"items": []})

    server.list = look
    await api.list(PODS, lambda pod: pod)
    assert {key.lower(): value for key, value in seen.items()}["authorization"].lower() == "bearer s3cret"
    with pytest.raises(ApiError, match=r"no usable cluster configuration: there is no .*absent"):
        async with connect(tmp_path / "absent"):
            pass


async def test_a_pods_token_that_cannot_be_read_is_retryable(server, tmp_path):
    token, authority = tmp_path / "token", tmp_path / "ca.crt"
    token.write_text("first")
    authority.write_text("read by TLS alone")
    environment = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": "1"}
    loader = kube_config.incluster_config.InClusterConfigLoader(token, authority, environ=environment)
    loader._token_refresh_period = timedelta(0)  # it is read again with each request
    configuration = Configuration()
    loader.load_and_set(configuration)
    configuration.host, configuration.ssl_ca_cert = server.url, None
    api = Api(configuration)
    for spoil in (lambda: token.write_text(""), lambda: token.write_bytes(b"\xff"), token.unlink):
        spoil()
        with pytest.raises(Retryable, match="the credentials cannot be read"):
            await api.list(PODS, lambda pod: pod)
    token.write_text("second")
    await api.list(PODS, lambda pod: pod)
    await api.close()
    assert len(server.requests) == 1


@pytest.mark.parametrize("name", [".", "..", "", "new/status", "new%2Fstatus", "../pods/new"])
async def test_a_name_that_no_object_can_have_asks_for_no_other_object(server, api, name):
    """Whoever makes a pod writes its owners' names, and the API server checks none."""
    for call in (api.get, api.delete):
        with pytest.raises(NotFound, match="no Pod can have the name"):
            await call(PODS, name, namespace="shop")
    assert server.requests == []


def test_paths_of_namespaced_objects_need_a_namespace():
    with pytest.raises(ValueError, match="namespaced"):
        PODS.path(name="p")


@pytest.mark.parametrize("excepted", ["", "api.invalid"])
async def test_a_proxy_in_the_environment_is_used(server, tmp_path, monkeypatch, excepted):
    monkeypatch.setenv("http_proxy", server.url)
    monkeypatch.setenv("no_proxy", excepted)
    kubeconfig = tmp_path / "proxied"
    kubeconfig.write_text(
        """{apiVersion: v1, kind: Config, current-context: fake,
        clusters: [{name: fake, cluster: {server: "http://api.invalid"}}],
        users: [{name: me, user: {token: s3cret}}],
        contexts: [{name: fake, context: {cluster: fake, user: me}}]}"""
    )
    async with connect(kubeconfig) as api:
        if excepted:
            with pytest.raises(Retryable):
                await api.list(PODS, lambda pod: pod)
        else:
            assert (await api.list(PODS, lambda pod: pod)).resource_version == "100"


PLUGIN = """#!{python}
import json, pathlib
runs = pathlib.Path({runs!r})
runs.write_text(runs.read_text() + "x")
status = {{"token": f"token-{{len(runs.read_text())}}"}}
if not pathlib.Path({works!r}).exists():
    raise SystemExit("log in first")
print(json.dumps({{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": status}}))
"""


class Expiring:
    """A kubeconfig with a program for its tokens, and a server that takes the one that it is told to."""

    def __init__(self, server: Any, folder: Path) -> None:
        self.runs, self.works, plugin = folder / "runs", folder / "works", folder / "plugin"
        self.runs.write_text("")
        self.works.touch()
        plugin.write_text(PLUGIN.format(python=sys.executable, runs=str(self.runs), works=str(self.works)))
        plugin.chmod(0o755)
        self.kubeconfig = folder / "exec"
        self.folder, self.url = folder, server.url
        self.write("fake")
        self.good = "token-1"
        self.seen: list[str] = []
        self._list, server.list = server.list, self.list

    def write(self, active: str) -> None:
        program = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(self.folder / "plugin")}
        fake = {"cluster": "fake", "user": "me"}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "fake", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"exec": program}}, {"name": "other", "user": {"token": "other"}}],
            "contexts": [
                {"name": "fake", "context": fake},
                {"name": "other", "context": fake | {"user": "other"}},
            ],
            "current-context": active,
        }
        self.kubeconfig.write_text(json.dumps(content))

    def list(self, request: web.Request) -> web.Response:
        self.seen.append(request.headers["Authorization"].removeprefix("Bearer "))
        if self.seen[-1] != self.good:
            return web.json_response({"message": "Unauthorized", "reason": "Unauthorized"}, status=401)
        return self._list(request)


@pytest.fixture
def expiring(server, tmp_path, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    return Expiring(server, tmp_path)


async def test_an_expired_token_is_renewed_once_for_all_requests(expiring):
    async with connect(expiring.kubeconfig) as api:
        await api.list(PODS, lambda pod: pod)
        expiring.good = "token-2"
        expiring.write("other")  # somebody's `kubectl config use-context` meanwhile changes nothing for us
        await asyncio.gather(*(api.list(PODS, lambda pod: pod) for _ in range(3)))
        assert sorted(expiring.seen) == ["token-1"] * 4 + ["token-2"] * 3
        assert expiring.runs.read_text() == "xx"


async def test_a_token_that_stays_refused_is_refused_after_one_more_try(expiring):
    async with connect(expiring.kubeconfig) as api:
        expiring.good = "of somebody else"
        with pytest.raises(Forbidden, match="Unauthorized"):
            await api.list(PODS, lambda pod: pod)
        assert expiring.seen == ["token-1", "token-2"]


async def test_what_cannot_be_renewed_stays_refused_and_is_renewed_later(expiring):
    async with connect(expiring.kubeconfig) as api:
        expiring.works.unlink()
        expiring.good = "token-4"
        with pytest.raises(Forbidden, match=r"cannot be renewed: .*no credentials: exec: process returned 1"):
            await api.list(PODS, lambda pod: pod)
        assert expiring.seen == ["token-1"], "nothing is asked without credentials"
        expiring.kubeconfig.rename(expiring.folder / "away")
        with pytest.raises(Forbidden, match="cannot be renewed: no usable cluster configuration: there is no"):
            await api.list(PODS, lambda pod: pod)
        (expiring.folder / "away").rename(expiring.kubeconfig)
        expiring.works.touch()
        expiring.good = "token-3"
        await api.list(PODS, lambda pod: pod)


async def test_a_renewed_client_certificate_gets_a_transport_and_requests_in_flight_keep_theirs(
    expiring, server, tmp_path
):
    async def read_again():
        configuration = Configuration()
        configuration.host = server.url
        configuration.cert_file, configuration.key_file = str(tmp_path / "tls.crt"), str(tmp_path / "tls.key")
        configuration.api_key["BearerToken"] = "Bearer token-1"
        return configuration

    configuration = Configuration()
    configuration.host = server.url
    configuration.api_key["BearerToken"] = "Bearer token-0"
    api = Api(configuration, read_again=read_again)
    before = api._rest
    with pytest.raises(Forbidden, match=r"cannot be renewed: .*No such file"):
        await api.list(PODS, lambda pod: pod)
    assert api._rest is before
    make_pair(tmp_path)
    await api.list(PODS, lambda pod: pod)
    assert api._rest is not before
    assert not before.pool_manager.closed
    await api.close()
    assert before.pool_manager.closed
