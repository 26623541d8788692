"""`gpushare explain` on a real API server: the events that it selects are those of the pod and its GpuShare."""

import pytest
from tests.operator.conftest import api_server, kubeconfig, namespace, real_api  # noqa: F401 - fixtures

from gpushare.cli.explain import explanation_of, read
from gpushare.core.api import names
from gpushare.core.placement import PlaceStanding
from gpushare.kube import PODS, Api, NotFound, Resource, record_event

pytestmark = [pytest.mark.integration, pytest.mark.own_server]


async def test_what_was_said_of_the_pod_is_found(real_api: Api, namespace: str) -> None:  # noqa: F811
    made = {}
    for name in ("subject", "other"):
        body = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": {names.FRACTION: "0.5"}},
            "spec": {"schedulerName": "nobody", "containers": [{"name": "main", "image": "none"}]},
        }
        made[name] = await real_api.create(PODS, body, namespace=namespace)
        about = {**made[name], "kind": "Pod", "apiVersion": "v1"}
        await record_event(real_api, about, reason="NoRoom", note=f"no room for {name}", action="Scheduling")
    reading = await read(real_api, namespace, "subject")
    assert reading.withheld == ()
    found, facts = explanation_of(reading.objects, reading.pod, reading.events)
    assert [(each.reason, each.note) for each in found.done] == [("NoRoom", "no room for subject")]
    assert found.standing is PlaceStanding.WAITS
    assert facts.waits_for == "kube-scheduler has not looked at it yet"


@pytest.mark.usefixtures("namespace")  # the definitions are served
async def test_a_path_of_no_api_is_answered_as_the_fake_does(real_api: Api) -> None:  # noqa: F811
    """Of a group and of a version that it does not serve (tests/support/fakecluster.py)."""
    for group, version in (("nobody.example.com", "v1"), (names.GROUP, "v0")):
        with pytest.raises(NotFound) as caught:
            await real_api.list(Resource(group, version, "gpunodes", "GpuNode", namespaced=False), lambda obj: obj)
        assert (str(caught.value), caught.value.reason) == ("404 page not found", "")
    assert await real_api.versions_of("nobody.example.com") == ()
    assert await real_api.versions_of(names.GROUP) == (names.VERSION,)
