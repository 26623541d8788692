"""The admission server as the API server sees it: AdmissionReviews over real HTTPS."""

import asyncio
import base64
import contextlib
import json
import shutil
import socket
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.operator.admissionclient import Client, Serving, pod

from gpushare.core.admission import AdmissionPolicy, Defaults
from gpushare.core.api import GpuShare, names
from gpushare.kube import Change
from gpushare.runtime.certificates import Certificate
from gpushare_operator.admission import AdmissionServerSettings, serve
from gpushare_operator.admission.__main__ import parse_settings
from gpushare_operator.admission.review import BadReviewError, Webhook, review
from gpushare_operator.admission.server import ServerLimits
from gpushare_operator.admission.watched import Watched

Json = dict[str, Any]
MakeCertificate = Callable[..., bytes]


DEPLOYMENT = {"group": "apps", "version": "v1", "kind": "Deployment"}


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
        {
            "op": "add",
            "path": "/spec/tolerations",
            "value": [{"key": key, "operator": "Exists"} for key in Defaults().taints],
        },
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
    assert 'gpushare_event_loop_lag_seconds_count{part="admission"}' in metrics


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


async def test_it_answers_by_either_family_unless_it_is_told_an_address(
    tmp_path: Path, make_certificate: Callable[..., bytes], monkeypatch: pytest.MonkeyPatch, free_port: int
) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no ::1")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "there-is-none"))
    trusted = ssl.create_default_context(cadata=make_certificate(tmp_path).decode())
    stop = asyncio.Event()
    server = asyncio.create_task(serve(AdmissionServerSettings(tmp_path, port=free_port), stop))
    try:
        for address in ("127.0.0.1", "::1"):
            async with asyncio.timeout(120):
                while True:
                    try:
                        _, writer = await asyncio.open_connection(
                            address, free_port, ssl=trusted, server_hostname="localhost"
                        )
                        break
                    except ConnectionRefusedError:  # not started yet; on ::1, before, for ever
                        assert address == "127.0.0.1"
                        await asyncio.sleep(0.01)
            writer.close()
    finally:
        stop.set()
        await server


def test_no_certificate_is_an_error_at_start(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"tls\.crt"):
        Certificate(tmp_path)


def test_settings_come_from_the_command_line_and_the_environment(capsys: pytest.CaptureFixture[str]) -> None:
    environment = {"GPUSHARE_DEFAULT_FRACTION": "0.2", "GPUSHARE_RUNTIME_CLASS": ""}
    settings = parse_settings(["--port", "9443", "--cert-dir", "/tls"], environment)
    assert settings == AdmissionServerSettings(
        Path("/tls"), "", 9443, AdmissionPolicy(Defaults(auto_fraction="0.2"), None)
    )
    allowing = parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_ALLOWED_ENV": "CUDA_VISIBLE_DEVICES,CUDA_MPS_X"})
    assert allowing.policy.allowed_env == {"CUDA_VISIBLE_DEVICES", "CUDA_MPS_X"}
    assert parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_MAX_SELECTORS": "7"}).policy.max_selectors == 7
    raised = parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_MAX_CLIENTS_PER_POD": "20"})
    assert raised.policy.max_clients_per_pod == 20
    assert settings.gpu_memory_reserve_mib == 512
    less = parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_GPU_MEMORY_RESERVE": "100"})
    assert less.gpu_memory_reserve_mib == 100, "as the extender reads it"
    with pytest.raises(SystemExit):
        parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_MAX_SELECTORS": "-1"})
    assert 'GPUSHARE_MAX_SELECTORS: "-1" is not a whole number from 0' in capsys.readouterr().err
    for wrong in ("auto", "1.5"):
        with pytest.raises(SystemExit) as end:
            parse_settings(["--cert-dir", "/tls"], {"GPUSHARE_DEFAULT_FRACTION": wrong})
        assert end.value.code == 2
        assert f'"{wrong}" is not a fraction' in capsys.readouterr().err


def first_pod_of_a_rollout() -> Json:
    """A pod of Deployment web's new ReplicaSet, whose uid no GpuShare lists yet."""
    first = pod(fraction="auto")
    first["metadata"]["labels"] = {"pod-template-hash": "abc", "track": "stable"}
    first["metadata"]["ownerReferences"] = [
        {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-abc", "uid": "new", "controller": True}
    ]
    return first


def deployment_web(
    kind: str = "Deployment", owner: str = "web", *, name: str = "deployment-web", **spec: Any
) -> GpuShare:
    """The GpuShare of that name, which lists an owner; the operator makes it without a spec."""
    listed = {"apiVersion": "apps/v1", "kind": kind, "name": owner, "uid": "web"}
    metadata = {"name": name, "namespace": "shop", "ownerReferences": [listed]}
    return GpuShare.from_object({"metadata": metadata, "spec": spec})


@pytest.mark.parametrize(
    "own",
    [
        deployment_web(selector={"matchLabels": {"track": "canary"}}, faultDomain="isolated"),
        deployment_web(owner="api"),
        deployment_web(kind="StatefulSet"),
    ],
    ids=["it selects other pods", "of another Deployment", "of another kind"],
)
def test_a_gpushare_of_a_deployments_name_is_not_taken_for_its_own(own: GpuShare) -> None:
    """Before: the first pod of each rollout was charged what a user's GpuShare asks for other pods."""
    watched = Watched()
    watched.on_share(Change.ADDED, "shop/deployment-web", own)
    assert watched.know(first_pod_of_a_rollout(), "shop").share is None
    watched.on_share(Change.MODIFIED, "shop/deployment-web", deployment_web())
    assert watched.know(first_pod_of_a_rollout(), "shop").share == deployment_web()


def test_a_deployments_own_is_found_whatever_its_name_is() -> None:
    """Before: where a user's GpuShare had the plain name, a rollout's first pod was admitted without one."""
    watched = Watched()
    theirs = deployment_web(selector={"matchLabels": {"track": "canary"}})
    own = deployment_web(name="deployment-web-04655a3f", memory="8Gi")
    for share in (theirs, own):
        watched.on_share(Change.ADDED, f"shop/{share.name}", share)
    assert watched.know(first_pod_of_a_rollout(), "shop").share is own
    assert watched.know(first_pod_of_a_rollout(), "elsewhere").share is None
    bare = first_pod_of_a_rollout()
    del bare["metadata"]["labels"]["pod-template-hash"]
    assert watched.know(bare, "shop").share is None, "of no Deployment that the pod tells of"
    watched.on_share(Change.DELETED, f"shop/{own.name}", own)
    assert watched.know(first_pod_of_a_rollout(), "shop").share is None


def test_what_is_watched_sharpens_the_answer() -> None:
    watched = Watched(gpu_memory_reserve_mib=512)
    unknown = watched.know(pod(fraction="auto"), "shop")
    assert (unknown.gpu_memories_mib, unknown.share) == (frozenset(), None)
    watched.on_node(Change.ADDED, "n1", frozenset({81559}))
    watched.on_node(Change.ADDED, "n2", frozenset({143771, 81559}))
    share = deployment_web()
    watched.on_share(Change.ADDED, "shop/deployment-web", share)
    first_of_a_rollout = first_pod_of_a_rollout()
    known = watched.know(first_of_a_rollout, "shop")
    assert (known.gpu_memories_mib, known.share) == ({81047, 143259}, share), "what tenants get of them"
    assert watched.know(first_of_a_rollout, "elsewhere").share is None
    watched.on_node(Change.DELETED, "n2", frozenset({143771, 81559}))
    watched.on_share(Change.DELETED, "shop/deployment-web", share)
    forgotten = watched.know(first_of_a_rollout, "shop")
    assert (forgotten.gpu_memories_mib, forgotten.share) == ({81047}, None)
    assert names.FRACTION in first_of_a_rollout["metadata"]["annotations"]


def test_one_selector_too_many_is_refused_by_what_is_watched() -> None:
    watched = Watched()

    def selecting(name: str) -> Json:
        return {"metadata": {"name": name, "namespace": "shop"}, "spec": {"selector": {}}}

    def asked(name: str, namespace: str = "shop") -> bool:
        request = {
            "uid": "r",
            "operation": "CREATE",
            "namespace": namespace,
            "object": selecting(name),
            "kind": {"group": names.GROUP, "version": "v1alpha1", "kind": "GpuShare"},
        }
        body = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}
        answer = review(body, Webhook.VALIDATE, AdmissionPolicy(max_selectors=2), watched.know)
        return bool(answer["response"]["allowed"])

    for name in ("a", "b"):
        assert asked(name)
        watched.on_share(Change.ADDED, f"shop/{name}", GpuShare.from_object(selecting(name)))
    assert not asked("c")
    assert asked("b"), "its own does not count"
    assert asked("c", "elsewhere")
