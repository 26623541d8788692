"""Which questions of `kubectl get` the tests' own reads take over; on the cluster they answer as kubectl does."""

import pytest
from livereads import Read, parsed


@pytest.mark.parametrize(
    ("arguments", "read"),
    [
        (["pods"], Read("pods", "", "default", False, "")),
        (["-n", "a", "pod", "b"], Read("pod", "b", "a", False, "")),
        (["--namespace=a", "deploy/b"], Read("deploy", "b", "a", False, "")),
        (["-A", "pods", "-l", "x in (a,b)"], Read("pods", "", "default", True, "labelSelector=x+in+%28a%2Cb%29")),
        (
            ["events", "--field-selector=involvedObject.name=b"],
            Read("events", "", "default", False, "fieldSelector=involvedObject.name%3Db"),
        ),
    ],
)
def test_what_is_understood(arguments: list[str], read: Read) -> None:
    assert parsed(arguments) == read


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["-n"],
        ["pods", "-w"],
        ["pods,nodes"],
        ["pod", "a", "b"],
        ["pod", "a", "-l", "x=y"],
        ["pod/a/b"],
        ["-f", "x"],
    ],
)
def test_all_else_is_left_to_kubectl(arguments: list[str]) -> None:
    assert parsed(arguments) is None
