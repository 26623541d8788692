"""Bytes as kube-scheduler 1.35 sends and reads them: Go field names, nulls where Go has nil."""

import orjson
import pytest

from gpushare.extender import wire

POD = {
    "metadata": {"name": "p", "namespace": "ns", "uid": "u", "annotations": {"gpushare.io/fraction": "0.5"}},
    "spec": {"containers": [{"name": "c", "resources": {"limits": {"gpushare.io/share": "50"}}}]},
    "status": {},
}


def test_extender_args():
    body = orjson.dumps({"Pod": POD, "Nodes": None, "NodeNames": ["a", "b"]})
    args = wire.read_filter_args(body)
    assert (args.pod.key, args.pod.limit_percent, args.node_names, args.nodes) == ("ns/p", 50, ["a", "b"], None)
    whole = wire.read_filter_args(orjson.dumps({"Pod": POD, "Nodes": {"items": [{"metadata": {"name": "a"}}]}}))
    assert whole.node_names == ["a"]


def test_extender_filter_result():
    args = wire.read_filter_args(orjson.dumps({"Pod": POD, "NodeNames": ["a", "b", "c"]}))
    assert wire.filter_result(args, ["a"], {"b": "full"}, {"c": "no GPU"}) == (
        b'{"Nodes":null,"NodeNames":["a"],"FailedNodes":{"b":"full"},'
        b'"FailedAndUnresolvableNodes":{"c":"no GPU"},"Error":""}'
    )
    assert wire.filter_error("starting") == (
        b'{"Nodes":null,"NodeNames":null,"FailedNodes":null,"FailedAndUnresolvableNodes":null,"Error":"starting"}'
    )


def test_a_list_of_names_is_read_once_and_never_mistaken():
    reader = wire.FilterReader()

    def body(*names: str, **more: object) -> bytes:
        return orjson.dumps({"Pod": POD, "Nodes": None, "NodeNames": names} | more)

    first = reader.read(body("a", "b"))
    assert (first.pod.key, first.node_names, first.nodes) == ("ns/p", ["a", "b"], None)
    again = reader.read(body("a", "b"))
    assert (again.node_list is first.node_list, again.pod is first.pod) == (True, True)
    other = {**POD, "metadata": {**POD["metadata"], "labels": {"changed": "yes"}}}
    assert reader.read(body("a", "b", Pod=other)).pod.labels == {"changed": "yes"}
    assert reader.read(body("a", "b")).pod == first.pod
    assert reader.read(body("a", "c")).node_names == ["a", "c"]
    assert reader.read(body("a")).node_names == ["a"]
    assert reader.read(body()).node_names == []
    assert reader.read(body("a", "b", Later={"x": ["y"]})).node_names == ["a", "b"]
    tricky = {**POD, "metadata": {**POD["metadata"], "labels": {"l": '"NodeNames":["z"]}'}}}
    assert reader.read(orjson.dumps({"NodeNames": ["a"], "Pod": tricky})).node_names == ["a"]
    for index in range(3 * wire.MAX_KEPT_LISTS):
        assert reader.read(body(f"n{index}")).node_names == [f"n{index}"]
    with pytest.raises(wire.BadRequest):
        reader.read(b'{"Pod":{"NodeNames":["a"]}')


def test_no_percent_sign_reaches_kube_scheduler():
    """It formats its events with our words as the format: "50% of" became "50%!o(MISSING)f" on 1.35."""
    assert b"%" not in wire.bind_result("node a: needs 50% of one GPU") + wire.filter_error("100%")
    assert wire.plain("needs 50% of one GPU") == "needs 50 percent of one GPU"


def test_binding():
    body = b'{"PodName":"p","PodNamespace":"ns","PodUID":"u","Node":"n"}'
    assert wire.read_bind_args(body) == wire.BindArgs("p", "ns", "u", "n")
    assert wire.bind_result("") == b'{"Error":""}'


@pytest.mark.parametrize("nil", [None, {}])
def test_preemption(nil):
    body = orjson.dumps(
        {
            "Pod": POD,
            "NodeNameToVictims": nil,
            "NodeNameToMetaVictims": {"n": {"Pods": [{"UID": "v"}], "NumPDBViolations": 2}, "m": {"Pods": None}},
        }
    )
    args = wire.read_preempt_args(body)
    assert args.victims == {"n": wire.Victims(("v",), 2), "m": wire.Victims((), 0)}
    assert wire.preempt_result({"n": wire.Victims(("v",), 2)}) == (
        b'{"NodeNameToMetaVictims":{"n":{"Pods":[{"UID":"v"}],"NumPDBViolations":2}}}'
    )
    whole = {"n": {"Pods": [{"metadata": {"uid": "v"}}], "NumPDBViolations": 1}}
    args = wire.read_preempt_args(orjson.dumps({"Pod": POD, "NodeNameToVictims": whole}))
    assert args.victims == {"n": wire.Victims(("v",), 1)}
