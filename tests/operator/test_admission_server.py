"""The admission server as the API server sees it: AdmissionReviews over real HTTPS."""

import asyncio
import base64
import contextlib
import json
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from yarl import URL

from gpushare.core.admission import AdmissionPolicy, Defaults
from gpushare.core.api import GpuShare, names
from gpushare.kube import Change
from gpushare.runtime.certificates import Certificate
from gpushare_operator.admission import AdmissionServerSettings, serve
from gpushare_operator.admission.__main__ import parse_settings
from gpushare_operator.admission.review import BadReviewError, Webhook, review
from gpushare_operator.admission.server import ServerLimits
from gpushare_operator.admission.turns import SmallestFirst, TooManyError
from gpushare_operator.admission.watched import Watched

Json = dict[str, Any]
MakeCertificate = Callable[..., bytes]


DEPLOYMENT = {"group": "apps", "version": "v1", "kind": "Deployment"}


class Client:
    """Posts reviews, trusting only the server's own certificate."""

    def __init__(self, session: aiohttp.ClientSession, base: str, trusted: ssl.SSLContext) -> None:
        self.session, self.base, self.trusted = session, base, trusted

    async def get(self, path: str) -> str:
        async with self.session.get(self.base + path) as response:
            assert response.status == 200
            return await response.text()

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        async with self.session.post(self.base + path, data=body) as response:
            return response.status, await response.read()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        address = URL(self.base)
        return await asyncio.open_connection(address.host, address.port, ssl=self.trusted)

    async def half_a_review(self, length: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Announces a body and sends its first byte."""
        reader, writer = await self.connect()
        writer.write(f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n{{".encode())
        await writer.drain()
        return reader, writer

    async def review(
        self, path: str, obj: Json, *, operation: str = "CREATE", kind: Json | None = None, **more: Json
    ) -> Json:
        request = {
            "uid": "r1",
            "operation": operation,
            "namespace": "shop",
            "object": obj,
            "kind": kind or {"group": "", "version": "v1", "kind": "Pod"},
            **more,
        }
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        status, raw = await self.post(path, json.dumps(body).encode())
        assert status == 200
        answer = json.loads(raw)
        assert (answer["apiVersion"], answer["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
        assert answer["response"]["uid"] == "r1"
        response: Json = answer["response"]
        return response


Serving = Callable[..., AbstractAsyncContextManager[Client]]


@pytest.fixture
def serving(
    tmp_path: Path, make_certificate: MakeCertificate, monkeypatch: pytest.MonkeyPatch, free_port: int
) -> Serving:
    """Makes a server with these limits, and a client of it."""
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "there-is-none"))
    trusted = ssl.create_default_context(cadata=make_certificate(tmp_path).decode())

    @asynccontextmanager
    async def run(limits: ServerLimits) -> AsyncIterator[Client]:
        policy = AdmissionPolicy(Defaults(auto_fraction="0.3"), "nvidia")
        settings = AdmissionServerSettings(tmp_path, "127.0.0.1", free_port, policy, limits)
        stop = asyncio.Event()
        server = asyncio.create_task(serve(settings, stop))
        connector = aiohttp.TCPConnector(ssl=trusted)
        async with aiohttp.ClientSession(connector=connector) as session:
            ready = Client(session, f"https://127.0.0.1:{settings.port}", trusted)
            for _ in range(3000):
                try:
                    await ready.get("/healthz")
                    break
                except aiohttp.ClientConnectionError:
                    await asyncio.sleep(0.01)
            yield ready
        stop.set()
        await server

    return run


@pytest.fixture
async def client(serving: Serving) -> AsyncIterator[Client]:
    async with serving(ServerLimits(read_seconds=60.0, wait_seconds=60.0)) as ready:
        yield ready


def pod(**annotations: str) -> Json:
    found = {f"gpushare.io/{key}": value for key, value in annotations.items()}
    return {"metadata": {"name": "p", "annotations": found}, "spec": {"containers": [{"name": "main"}]}}


async def test_metrics_need_the_token_where_there_is_one_and_reviews_do_not(
    serving: Serving, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("secret")
    monkeypatch.setenv("GPUSHARE_METRICS_TOKEN_FILE", str(tmp_path / "token"))
    async with serving(ServerLimits(read_seconds=60.0, wait_seconds=60.0)) as client:
        seen = []
        for headers in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer secret"}):
            async with client.session.get(f"{client.base}/metrics", headers=headers) as response:
                seen.append(response.status)
        assert seen == [401, 401, 200]
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True


async def test_a_pod_is_patched(client: Client) -> None:
    response = await client.review("/mutate", pod(fraction="auto", memroy="8Gi"))
    assert response["allowed"] is True
    assert response["patchType"] == "JSONPatch"
    assert json.loads(base64.b64decode(response["patch"])) == [
        {
            "op": "add",
            "path": "/spec/containers/0/resources",
            "value": {"limits": {"gpushare.io/share": "30"}, "requests": {"gpushare.io/share": "30"}},
        },
        {"op": "add", "path": "/spec/schedulerName", "value": "gpushare-scheduler"},
        {"op": "add", "path": "/metadata/labels", "value": {"gpushare.io/managed": "true"}},
        {"op": "add", "path": "/spec/runtimeClassName", "value": "nvidia"},
    ]
    assert "did you mean gpushare.io/memory?" in response["warnings"][0]


async def test_a_wrong_pod_is_refused_by_both(client: Client) -> None:
    for path in ("/mutate", "/validate"):
        response = await client.review(path, pod(fraction="1.5"))
        assert response["allowed"] is False
        assert response["status"]["code"] == 422
        assert response["status"]["message"].startswith(
            'annotation gpushare.io/fraction: "1.5" asks for more than'
        )
    metrics = await client.get("/metrics")
    assert 'gpushare_admission_rejections_total{reason="InvalidAnnotation"} 2.0' in metrics
    assert 'gpushare_admission_reviews_total{result="refused",webhook="mutate"} 1.0' in metrics


async def test_what_is_not_ours_passes(client: Client) -> None:
    for path in ("/mutate", "/validate"):
        assert await client.review(path, {"spec": {"containers": []}}) == {"uid": "r1", "allowed": True}
        assert await client.review(path, pod(fraction="9.9"), operation="UPDATE") == {"uid": "r1", "allowed": True}
        nothing = await client.review(path, {}, operation="DELETE", object=None)  # type: ignore[arg-type]  # as sent
        assert nothing["allowed"] is True


async def test_a_misspelt_annotation_gets_a_warning_on_pods_and_templates(client: Client) -> None:
    for path, obj, kind in (
        ("/validate", pod(fraktion="0.5"), None),
        ("/validate", {"spec": {"template": pod(fraktion="0.5")}}, DEPLOYMENT),
    ):
        response = await client.review(path, obj, kind=kind)
        assert response["allowed"] is True
        misspelt, without = response["warnings"]
        assert "did you mean gpushare.io/fraction?" in misspelt
        assert "gets no GPU" in without
    same = {"spec": {"template": pod(fraktion="0.5")}}
    twice = await client.review("/validate", same, kind=DEPLOYMENT, operation="UPDATE", oldObject=same)
    assert "warnings" not in twice, "a template that did not change"


async def test_templates_of_workloads_are_refused(client: Client) -> None:
    kind = DEPLOYMENT
    bad, good = ({"spec": {"template": pod(fraction=fraction)}} for fraction in ("abc", "0.5"))
    assert (await client.review("/validate", bad, kind=kind))["allowed"] is False
    assert (await client.review("/validate", good, kind=kind))["allowed"] is True
    update = {"operation": "UPDATE", "kind": kind}
    assert (await client.review("/validate", bad, oldObject=good, **update))["allowed"] is False  # type: ignore[arg-type]
    assert (await client.review("/validate", bad, oldObject=bad, **update))["allowed"] is True  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"", "empty document"),
        (b"[]", "not an AdmissionReview"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1beta1"}', "only v1"),
        (b'{"kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1"}', "no request"),
    ],
)
async def test_what_is_no_review_gets_400(client: Client, body: bytes, why: str) -> None:
    for path in ("/mutate", "/validate"):
        status, answer = await client.post(path, body)
        assert status == 400
        assert why in answer.decode()
    assert "ok" in await client.get("/healthz")


WRONG = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)
FIELDS = st.sampled_from(
    [
        "metadata",
        "annotations",
        "labels",
        "ownerReferences",
        "spec",
        "containers",
        "initContainers",
        "resources",
        "limits",
        "requests",
        "env",
        "valueFrom",
        "fieldRef",
        "name",
        "schedulerName",
        "nodeName",
        "template",
        "jobTemplate",
        "gpushare.io/share",
    ]
)


def misshapen(draw: st.DrawFn, tree: Any) -> Any:
    """A copy of an object with one field somewhere of any other type, or added."""
    if isinstance(tree, list) and tree and draw(st.booleans()):
        return [misshapen(draw, tree[0]), *tree[1:]]
    if isinstance(tree, dict) and tree and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(tree)))
        return {**tree, key: misshapen(draw, tree[key])}
    return {**tree, draw(FIELDS): draw(WRONG)} if isinstance(tree, dict) and draw(st.booleans()) else draw(WRONG)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_an_object_of_no_kubernetes_shape_is_answered_or_refused_and_breaks_nothing(data: st.DataObject) -> None:
    whole = pod(fraction="auto", memory="1Gi", fraktion="x")
    whole["metadata"] |= {
        "labels": {"pod-template-hash": "abc"},
        "ownerReferences": [{"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "u"}],
    }
    whole["spec"]["containers"][0] |= {
        "env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "x"}}}],
        "resources": {"limits": {"cpu": "1"}, "requests": {"cpu": "1"}},
    }
    is_pod = data.draw(st.booleans())
    obj = misshapen(data.draw, whole if is_pod else {"spec": {"replicas": 1, "template": whole}})
    request = {
        "uid": "r",
        "operation": "CREATE",
        "namespace": "shop",
        "object": obj,
        "kind": {"group": "", "kind": "Pod"} if is_pod else DEPLOYMENT,
    }
    body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    for webhook in Webhook:
        with contextlib.suppress(BadReviewError):
            answer = review(body, webhook, AdmissionPolicy(), Watched().know)
            assert isinstance(answer["response"]["allowed"], bool)


async def test_a_large_body_that_does_not_come_holds_up_no_small_one(serving: Serving) -> None:
    patient = ServerLimits(reading=1, read_seconds=60.0, wait_seconds=60.0)
    async with serving(patient) as client:
        status, _ = await client.post("/mutate", b"x" * (patient.body_bytes + 1))
        assert status == 413
        _, writer = await client.half_a_review(70_000)
        for _ in range(3):
            assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        writer.close()
        large = pod(fraction="0.5")
        large["metadata"]["annotations"]["example.com/x"] = "x" * 100_000
        assert (await client.review("/mutate", large))["allowed"] is True, "the slot was given back"


async def test_of_those_that_wait_the_smallest_is_next_and_the_largest_is_given_up() -> None:
    turns, done = SmallestFirst(most=4), []

    async def one(size: int) -> None:
        try:
            await turns.turn(size)
            done.append(size)
        except TooManyError:
            done.append(-size)

    async with asyncio.TaskGroup() as tasks:
        for size in (60, 50, 40, 30, 70, 3, 70, 1):
            tasks.create_task(one(size))
    assert sorted(done, key=abs) == [1, 3, 30, 40, -50, -60, -70, -70]
    assert [size for size in done if size > 0] == [1, 3, 30, 40]
    await asyncio.wait_for(turns.turn(10**6), 60)


async def test_who_gives_up_waiting_costs_nobody_a_turn() -> None:
    turns = SmallestFirst()
    async with asyncio.TaskGroup() as tasks:
        gone = tasks.create_task(turns.turn(1))
        last = tasks.create_task(turns.turn(2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait_for(last, 60)


async def test_a_flood_of_large_reviews_delays_a_small_one_by_one_of_them(serving: Serving) -> None:
    """Counted in reviews, not in time: nearly all of the flood are answered after the small one."""
    crowd = pod(fraction="0.5")
    crowd["spec"]["containers"] = [{"name": f"c{number}", "image": "x"} for number in range(1400)]
    request = {"uid": "r1", "operation": "CREATE", "namespace": "shop", "object": crowd, "kind": {"kind": "Pod"}}
    large = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    body = json.dumps(large).encode()
    assert len(body) < 65_536
    patient = ServerLimits(read_seconds=120.0, wait_seconds=120.0)
    async with serving(patient) as client:
        answered: list[str] = []
        five = asyncio.Event()

        async def flood() -> None:
            status, _ = await client.post("/mutate", body)
            assert status == 200
            answered.append("large")
            if len(answered) == 5:
                five.set()

        async with asyncio.TaskGroup() as tasks:
            for _ in range(80):
                tasks.create_task(flood())
            await five.wait()
            await client.review("/mutate", pod(fraction="0.5"))
            answered.append("small")
        assert answered.index("small") < 60


async def test_too_many_reviews_at_once_are_told_so(serving: Serving) -> None:
    async with serving(ServerLimits(waiting=0)) as client:
        status, text = await client.post("/mutate", b"{}")
        assert (status, text) == (503, b"too many reviews at once\n")
        assert 'reviews_total{result="overloaded",webhook="mutate"} 1.0' in await client.get("/metrics")


async def test_bodies_that_do_not_come_are_given_up(serving: Serving) -> None:
    async with serving(ServerLimits(reading=1, read_seconds=0.05, wait_seconds=0.05)) as client:
        opened = [await client.half_a_review(length) for length in (70_000, 70_000, 70_000, 100)]
        for reader, writer in opened:
            answer = await asyncio.wait_for(reader.read(), 60)  # to the end: the server closes the connection
            assert answer.startswith((b"HTTP/1.1 408 ", b"HTTP/1.1 503 "))
            writer.close()
        assert 'reviews_total{result="unread",webhook="mutate"} 4.0' in await client.get("/metrics")


async def test_a_connection_that_never_asks_is_closed(serving: Serving) -> None:
    async with serving(ServerLimits(idle_seconds=0.1)) as client:
        reader, writer = await client.connect()
        assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()
        await client.get("/healthz")


BOUNDED = ServerLimits(
    connections=16, read_seconds=600.0, wait_seconds=600.0, idle_seconds=600.0, handshake_seconds=600.0
)


async def is_closed(reader: asyncio.StreamReader) -> bool:
    """Waits for its end; a connection that stays open fails the test."""
    with contextlib.suppress(OSError):
        await asyncio.wait_for(reader.read(), 60)
    return True


async def test_a_flood_of_connections_that_say_nothing_keeps_no_review_waiting(serving: Serving) -> None:
    """Before: connections were not bounded, and each kept a descriptor for 5 s without a handshake, 30 s with."""
    async with serving(BOUNDED) as client:
        address = URL(client.base)
        silent = []
        for number in range(60):
            tls = client.trusted if number % 2 else None
            silent.append(await asyncio.open_connection(address.host, address.port, ssl=tls))
            if number % 10 == 0:
                assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for reader, _ in silent[: 60 - 16]:
            assert await is_closed(reader)
        shown = await client.get("/metrics")
        assert "gpushare_admission_connections 16.0" in shown
        assert "gpushare_admission_connections_closed 0.0" not in shown
        assert len(client.session.connector._conns) == 1, "the API server's own connection was never closed"
        for _, writer in silent:
            writer.close()


async def test_who_asked_once_and_keeps_its_connection_makes_room_too(serving: Serving) -> None:
    async with serving(BOUNDED) as client:
        kept = []
        for _ in range(40):
            reader, writer = await client.connect()
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200 ")
            kept.append((reader, writer))
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for reader, _ in kept[: 40 - 16]:
            assert await is_closed(reader)
        for _, writer in kept:
            writer.close()


async def test_very_many_bodies_that_do_not_come_keep_no_review_waiting(serving: Serving) -> None:
    """Small bodies have no slots of their own: connections bound them."""
    async with serving(BOUNDED) as client:
        halves = [await client.half_a_review(1000) for _ in range(40)]
        assert (await client.review("/mutate", pod(fraction="0.5")))["allowed"] is True
        for reader, _ in halves[: 40 - 16]:
            assert await is_closed(reader)
        for _, writer in halves:
            writer.close()


async def test_bodies_that_do_not_come_cost_neither_the_api_servers_connections_nor_new_ones(
    serving: Serving,
) -> None:
    """Before: headers and one byte were a request under way, for which connections that waited were closed."""
    request = {"uid": "r1", "operation": "CREATE", "namespace": "shop", "object": pod(fraction="0.5")}
    asked = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
    body = json.dumps({**asked, "request": {**request, "kind": {"kind": "Pod"}}}).encode()
    head = f"POST /mutate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()

    async def answered(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        writer.write(head + body)
        answer = await asyncio.wait_for(reader.readuntil(b"}}"), 60)
        return answer.startswith(b"HTTP/1.1 200 ") and b'"allowed":true' in answer

    async def new_one(client: Client) -> bool:
        reader, writer = await client.connect()
        try:
            return await answered(reader, writer)
        finally:
            writer.close()

    async with serving(replace(BOUNDED, connections=64)) as client:
        kept = await client.connect()
        assert await answered(*kept)
        halves: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []
        for _ in range(17):  # 32 at once; 544 in all
            async with asyncio.TaskGroup() as tasks:
                slow = [tasks.create_task(client.half_a_review(1000)) for _ in range(16)]
                new = tasks.create_task(new_one(client))
                slow += [tasks.create_task(client.half_a_review(1000)) for _ in range(16)]
            halves += [each.result() for each in slow]
            assert new.result()
            assert await answered(*kept)
        assert "gpushare_admission_connections_closed 0.0" not in await client.get("/metrics")
        for _, writer in (kept, *halves):
            writer.close()


@pytest.mark.parametrize("what", [b"GET /healthz HTTP/1.1\r\n", b"POST /mutate HTTP/1.1\r\nContent-Length: 2\r\n"])
async def test_who_never_had_a_review_answered_goes_before_who_had(serving: Serving, what: bytes) -> None:
    async with serving(BOUNDED) as client:
        await client.review("/mutate", pod(fraction="0.5"))
        others = []
        for _ in range(40):
            reader, writer = await client.connect()
            writer.write(what + b"Host: x\r\n\r\n" + (b"{}" if what.startswith(b"POST") else b""))
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 ")
            others.append(writer)
        connections = [each for every in client.session.connector._conns.values() for each in every]
        assert [each[0].is_connected() for each in connections] == [True], "the API server's own"
        for writer in others:
            writer.close()


async def test_another_path_or_method_is_nothing(client: Client) -> None:
    assert (await client.post("/elsewhere", b"{}"))[0] == 404
    async with client.session.get(client.base + "/mutate") as response:
        assert response.status == 405


async def test_a_new_certificate_is_taken_up_without_a_restart(
    tmp_path: Path, make_certificate: MakeCertificate
) -> None:
    """The server's side of a handshake shows the new certificate; a broken pair leaves the old one in use."""
    first = make_certificate(tmp_path / "tls", "first")
    certificate = Certificate(tmp_path / "tls")
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context)
    port = server.sockets[0].getsockname()[1]

    async def shown() -> str:
        return await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))

    async with server:
        assert await shown() == first.decode()
        assert certificate.reload_if_changed() is False

        make_certificate(tmp_path / "other")
        shutil.copy(tmp_path / "other" / "tls.key", tmp_path / "tls" / "tls.key")
        assert certificate.reload_if_changed() is False, "a key that does not fit"
        assert (certificate.failures, await shown()) == (1, first.decode())

        second = make_certificate(tmp_path / "tls", "second")
        assert certificate.reload_if_changed() is True
        assert await shown() == second.decode()
        (tmp_path / "tls" / "tls.crt").unlink()
        assert certificate.reload_if_changed() is False
        assert await shown() == second.decode()
    assert (certificate.reloads, certificate.failures) == (1, 2)


def test_no_certificate_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tls\.crt"):
        Certificate(tmp_path)


def test_settings_come_from_the_command_line_and_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"GPUSHARE_DEFAULT_FRACTION": "0.2", "GPUSHARE_RUNTIME_CLASS": ""}
    settings = parse_settings(["--port", "9443", "--cert-dir", "/tls"], environment)
    assert settings == AdmissionServerSettings(
        Path("/tls"), "0.0.0.0", 9443, AdmissionPolicy(Defaults(auto_fraction="0.2"), None)
    )
    allowing = parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_ALLOWED_ENV": "CUDA_VISIBLE_DEVICES,CUDA_MPS_X"})
    assert allowing.policy.allowed_env == {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_X"}
    assert parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_MAX_SELECTORS": "7"}).policy.max_selectors == 7
    with pytest.raises(SystemExit):
        parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_MAX_SELECTORS": "-1"})
    assert 'GPUSHARE_MAX_SELECTORS: "-1" is not a whole number from 0' in capsys.readouterr().err
    for wrong in ("auto", "1.5"):
        with pytest.raises(SystemExit) as end:
            parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_DEFAULT_FRACTION": wrong})
        assert end.value.code == 2
        assert f'"{wrong}" is not a fraction' in capsys.readouterr().err


def test_what_is_watched_sharpens_the_answer() -> None:
    watched = Watched()
    unknown = watched.know(pod(fraction="auto"), "shop")
    assert (unknown.gpu_memories_mib, unknown.share) == (frozenset(), None)
    watched.on_node(Change.ADDED, "n1", frozenset({81559}))
    watched.on_node(Change.ADDED, "n2", frozenset({143771, 81559}))
    share = GpuShare.from_object({"metadata": {"name": "deployment-web", "namespace": "shop"}})
    watched.on_share(Change.ADDED, "shop/deployment-web", share)

    first_of_a_rollout = pod(fraction="auto")
    first_of_a_rollout["metadata"]["labels"] = {"pod-template-hash": "abc"}
    first_of_a_rollout["metadata"]["ownerReferences"] = [
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "new", "controller": True}
    ]
    known = watched.know(first_of_a_rollout, "shop")
    assert (known.gpu_memories_mib, known.share) == ({81559, 143771}, share)
    assert watched.know(first_of_a_rollout, "elsewhere").share is None
    watched.on_node(Change.DELETED, "n2", frozenset({143771, 81559}))
    watched.on_share(Change.DELETED, "shop/deployment-web", share)
    forgotten = watched.know(first_of_a_rollout, "shop")
    assert (forgotten.gpu_memories_mib, forgotten.share) == ({81559}, None)
    assert names.FRACTION in first_of_a_rollout["metadata"]["annotations"]


def test_one_selector_too_many_is_refused_by_what_is_watched() -> None:
    watched = Watched()

    def selecting(name: str) -> Json:
        return {"metadata": {"name": name, "namespace": "shop"}, "spec": {"selector": {}}}

    def asked(name: str, namespace: str = "shop") -> bool:
        request = {
            "uid": "r", "operation": "CREATE", "namespace": namespace, "object": selecting(name),
            "kind": {"group": names.GROUP, "version": "v1alpha1", "kind": "GpuShare"},
        }  # fmt: skip
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        answer = review(body, Webhook.VALIDATE, AdmissionPolicy(max_selectors=2), watched.know)
        return bool(answer["response"]["allowed"])

    for name in ("a", "b"):
        assert asked(name)
        watched.on_share(Change.ADDED, f"shop/{name}", GpuShare.from_object(selecting(name)))
    assert not asked("c")
    assert asked("b"), "its own does not count"
    assert asked("c", "elsewhere")
