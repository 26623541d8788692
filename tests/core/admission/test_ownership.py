"""One GpuShare per owner: who that is, what it is called, what is made."""

import re
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from gpushare.core.admission import ownership
from gpushare.core.admission.share_index import ShareIndex
from gpushare.core.api.meta import OwnerReference
from gpushare.core.api.objects import GpuShare

Json = dict[str, Any]
REPLICASET = {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d4b9", "uid": "rs1", "controller": True}
DEPLOYMENT = OwnerReference("apps/v1", "Deployment", "web", "d1", True)
KINDS = st.sampled_from(
    [("apps/v1", "Deployment"), ("apps/v1", "StatefulSet"), ("batch/v1", "Job"), ("kubeflow.org/v1", "Job")]
)
NAMES = st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True)
OWNERS = st.builds(lambda k, name: OwnerReference(k[0], k[1], name, "u"), KINDS, NAMES)


def pod(*owners: Json, labels: Json | None = None) -> Json:
    return {"metadata": {"name": "p", "uid": "p1", "labels": labels or {}, "ownerReferences": list(owners)}}


def test_the_controller_is_the_owner_that_manages() -> None:
    other = {**REPLICASET, "uid": "x", "controller": False}
    assert ownership.controller_of(pod(other, REPLICASET)) == OwnerReference(
        "apps/v1", "ReplicaSet", "web-7d4b9", "rs1", True
    )
    assert ownership.controller_of(pod(other)) is None
    assert ownership.controller_of({}) is None


def test_only_replicasets_and_jobs_are_looked_above() -> None:
    looked = {
        (version, kind): ownership.may_have_owner(OwnerReference(version, kind, "x", "u"))
        for version, kind in [
            ("apps/v1", "ReplicaSet"),
            ("batch/v1", "Job"),
            ("apps/v1", "Deployment"),
            ("apps/v1", "StatefulSet"),
            ("kubeflow.org/v1", "Job"),
            ("v1", "Pod"),
        ]
    }
    assert [key for key, value in looked.items() if value] == [("apps/v1", "ReplicaSet"), ("batch/v1", "Job")]


def test_a_deployment_is_known_by_its_pod_alone() -> None:
    guessed = ownership.guess_top_owner(pod(REPLICASET, labels={"pod-template-hash": "7d4b9"}))
    assert guessed is not None
    assert ownership.share_name(guessed) == ownership.share_name(DEPLOYMENT) == "deployment-web"
    bare = ownership.guess_top_owner(pod(REPLICASET))
    assert bare is not None
    assert ownership.share_name(bare) == "replicaset-web-7d4b9"
    assert ownership.guess_top_owner(pod()) is None
    assert ownership.share_name(ownership.pod_as_owner(pod())) == "pod-p"


@given(OWNERS)
def test_names_are_ones_that_kubernetes_takes(owner: OwnerReference) -> None:
    for name in (ownership.share_name(owner), ownership.share_name(owner, distinct=True)):
        assert len(name) <= 253
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?", name)


@given(OWNERS, OWNERS)
def test_two_owners_never_share_a_name(one: OwnerReference, other: OwnerReference) -> None:
    def group(owner: OwnerReference) -> str:
        return owner.api_version.rpartition("/")[0]

    same = (group(one), one.kind, one.name) == (group(other), other.kind, other.name)
    assert (ownership.share_name(one) == ownership.share_name(other)) == same


def test_the_same_kind_of_another_group_and_another_uid_are_told_apart() -> None:
    ours, theirs = (OwnerReference(version, "Job", "x", "u") for version in ("batch/v1", "kubeflow.org/v1"))
    assert ownership.share_name(ours) == "job-x"
    assert ownership.share_name(theirs).startswith("job-x-")
    again = OwnerReference("batch/v1", "Job", "x", "another")
    assert ownership.share_name(ours, distinct=True) != ownership.share_name(again, distinct=True)


def test_what_is_made_is_found_by_every_part_and_collected_with_its_owners() -> None:
    replicaset = OwnerReference("apps/v1", "ReplicaSet", "web-7d4b9", "rs1", True)
    made = ownership.new_share("shop", "deployment-web", (replicaset, DEPLOYMENT), "0.25")
    assert made == {
        "apiVersion": "gpushare.io/v1alpha1",
        "kind": "GpuShare",
        "metadata": {
            "name": "deployment-web",
            "namespace": "shop",
            "labels": {"app.kubernetes.io/managed-by": "gpushare-operator"},
            "ownerReferences": [
                {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "uid": "d1"},
                {"apiVersion": "apps/v1", "kind": "ReplicaSet", "name": "web-7d4b9", "uid": "rs1"},
            ],
        },
        "spec": {"fraction": "0.25"},
    }
    share = GpuShare.from_object(made)
    assert ShareIndex([share]).of("shop", {}, ["rs1"]) is share
    assert ownership.missing_owners(share, (replicaset, DEPLOYMENT)) == ()
    rolled_out = OwnerReference("apps/v1", "ReplicaSet", "web-99", "rs2", True)
    assert ownership.missing_owners(share, (rolled_out, DEPLOYMENT)) == (rolled_out,)


def test_a_fraction_that_the_api_server_would_refuse_is_left_out() -> None:
    assert ownership.new_share("shop", "x", (DEPLOYMENT,), "1.5")["spec"] == {}
    assert ownership.new_share("shop", "x", (DEPLOYMENT,), "auto")["spec"] == {"fraction": "auto"}
