"""The index of GpuShares answers what the rule says, after any history."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from sharerule import share_of

from gpushare.core.admission.share_index import PlacedShares, ShareIndex, ShareKey
from gpushare.core.api.meta import LabelRequirement, LabelSelector, OwnerReference, SelectorOperator
from gpushare.core.api.objects import GpuShare, GpuShareSpec, GpuShareStatus


def share(name, *owners, namespace="ns", selector=None, kind="ReplicaSet"):
    references = tuple(OwnerReference("apps/v1", kind, f"name-{uid}", uid) for uid in owners)
    return GpuShare(namespace, name, name, 1, references, GpuShareSpec(selector=selector), GpuShareStatus())


def test_a_selector_wins_over_an_owner_and_the_first_by_name_over_later_ones():
    made = share("a-made", "o1")
    chosen = share("b", selector=LabelSelector(match_labels={"app": "web"}))
    later = share("c", selector=LabelSelector())
    everyone = ShareIndex([later, made, chosen])
    assert everyone.of("ns", {"app": "web"}, ["o1"]) is chosen
    assert everyone.of("ns", {"app": "db"}, ["o1"]) is later
    assert everyone.of("other", {"app": "web"}, ["o1"]) is None
    everyone.drop("ns", "c")
    assert everyone.of("ns", {"app": "db"}, ["o1"]) is made
    assert everyone.of("ns", {"app": "db"}, ["o2"]) is None
    assert everyone.get("ns", "b") is chosen
    assert set(everyone.shares) == {ShareKey("ns", "a-made"), ShareKey("ns", "b")}


def test_putting_returns_what_was_there_and_dropping_nothing_is_none():
    index = ShareIndex()
    first, second = share("a", "o1"), share("a", "o2")
    assert index.put(first) is None
    assert index.put(second) is first
    assert index.of("ns", {}, ["o1"]) is None
    assert index.of("ns", {}, ["o2"]) is second
    assert index.drop("ns", "a") is second
    assert index.drop("ns", "a") is None


def test_a_deployments_is_found_by_its_name():
    chosen = share("a", "d1", selector=LabelSelector(), kind="Deployment")
    first, second = (share(name, "d1", "d2", kind="Deployment") for name in "bc")
    index = ShareIndex([share("0", "d1"), chosen, second, first])
    assert index.of_deployment("ns", "name-d1") is first
    assert index.of_deployment("other", "name-d1") is None
    index.put(share("b", "d1", kind="StatefulSet"))
    assert index.of_deployment("ns", "name-d1") is second
    index.put(share("c", "d2", kind="Deployment"))
    assert index.of_deployment("ns", "name-d1") is None
    assert index.of_deployment("ns", "name-d2") is not None


def test_selectors_are_counted_by_namespace():
    index = ShareIndex(
        [share("a", selector=LabelSelector()), share("b", "o1"), share("c", selector=LabelSelector())]
    )
    index.put(share("a", selector=LabelSelector(match_labels={"app": "web"})))
    assert (index.selecting("ns"), index.selecting("other")) == (2, 0)
    assert [index.selecting("ns", besides=name) for name in ("a", "b", "new")] == [1, 2, 2]
    index.put(share("a", "o1"))
    index.drop("ns", "c")
    assert index.selecting("ns") == 0


LABELS = st.dictionaries(st.sampled_from(["app", "tier"]), st.sampled_from(["x", "y"]))
EXPRESSIONS = st.lists(
    st.builds(
        LabelRequirement,
        key=st.sampled_from(["app", "tier"]),
        operator=st.sampled_from(list(SelectorOperator)),
        values=st.lists(st.sampled_from(["x", "y", "z"]), min_size=1, max_size=3).map(tuple),
    ),
    max_size=2,
).map(tuple)
SELECTORS = st.none() | st.builds(LabelSelector, match_labels=LABELS, match_expressions=EXPRESSIONS)
OWNERS = st.lists(st.sampled_from(["o1", "o2", "o3"]), max_size=2, unique=True)
CHANGES = st.lists(st.tuples(st.sampled_from("abcd"), SELECTORS, OWNERS, st.booleans()), max_size=12)


@given(CHANGES, LABELS, OWNERS)
def test_any_history_leaves_what_the_rule_says(changes, labels, owners):
    index, stored = ShareIndex(), {}
    for name, selector, share_owners, goes in changes:
        if goes:
            assert index.drop("ns", name) is stored.pop(name, None)
        else:
            stored[name] = share(name, *share_owners, selector=selector)
            index.put(stored[name])
    assert index.of("ns", labels, owners) is share_of(labels, owners, stored.values())


@dataclass(frozen=True)
class Kept:
    pod_uids: frozenset[str]
    partly_listed: GpuShare | None = None


@dataclass(frozen=True)
class Owned:
    labels: dict[str, str]
    owner_uids: tuple[str, ...]
    namespace: str = "ns"


KEYS = st.builds("{}/{}".format, st.sampled_from(["a", "b"]), st.sampled_from("xyz"))
KEPT = st.builds(Kept, st.frozensets(st.sampled_from(["p", "q", "r"])))


@given(changes=st.lists(st.tuples(KEYS, st.one_of(st.none(), KEPT)), max_size=12))
def test_placed_shares_are_found_by_pod_in_their_own_namespace_after_any_history(changes):
    found, expected = PlacedShares(), {}
    for key, kept in changes:
        if kept is None:
            assert found.pop(key, None) == expected.pop(key, None)
        else:
            found[key] = expected[key] = kept
    assert dict(found) == expected
    for namespace in ("a", "b", "c"):
        for uid in ("p", "q", "r", "nobody"):
            by_rule = [
                expected[key]
                for key in sorted(expected)
                if key.startswith(f"{namespace}/") and uid in expected[key].pod_uids
            ]
            assert found.of(namespace, uid) == by_rule
    found.clear()
    assert not found
    assert not found.of("a", "p")


PODS = st.lists(st.builds(Owned, LABELS, OWNERS.map(tuple)), max_size=8)
MADE = st.dictionaries(st.sampled_from("abcd"), st.tuples(SELECTORS, OWNERS), max_size=4)


@given(shares=MADE, owned=PODS, longest=st.integers(1, 4), gone=st.sets(st.sampled_from("abcd")))
def test_a_pod_beyond_a_full_list_is_found_as_the_operator_finds_it(shares, owned, longest, gone):
    pods = {f"uid-{number}": pod for number, pod in enumerate(owned)}
    stored = {name: share(name, *owners, selector=selector) for name, (selector, owners) in shares.items()}
    found = PlacedShares(pods=pods)
    for names_left in (stored.keys(), stored.keys() - gone):
        for name in stored.keys() - names_left:
            found.pop(f"ns/{name}", None)
        index = ShareIndex(stored[name] for name in names_left)
        own = {uid: index.of("ns", pod.labels, (*pod.owner_uids, uid)) for uid, pod in pods.items()}
        for name in names_left:
            uids = [uid for uid, of_pod in own.items() if of_pod is stored[name]]
            is_full = len(uids) >= longest
            found[f"ns/{name}"] = Kept(frozenset(uids[:longest]), stored[name] if is_full else None)
        for uid, of_pod in own.items():
            assert found.of("ns", uid) == ([] if of_pod is None else [found[f"ns/{of_pod.name}"]])
            assert found.of("other", uid) == []
    assert found.of("ns", "of a pod that is not here") == []
