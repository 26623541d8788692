"""What bench/hami.py makes of bindings and of HAMi's annotations, and that it reads the arguments of its page."""

from typing import Any

import pytest
from bench import awkward, controlplane, fleet, hami
from blocks import commands, words

PROGRAMS = {"hami": hami, "awkward": awkward}


def test_the_rate_is_taken_between_the_first_and_the_last_tenth() -> None:
    steady = [0.5 * number for number in range(100)]
    assert hami.rate(steady) == pytest.approx(2.0)
    slow_ends = [-50.0, *steady[1:-1], 500.0]
    assert hami.rate(slow_ends) == pytest.approx(2.0)
    pause = [*steady[:50], *(each + 40.0 for each in steady[50:])]
    assert hami.rate(pause) == pytest.approx(80 / 80.0), "80 pods in 40 s of work and 40 s of pause"


def test_fewer_than_ten_have_no_rate() -> None:
    assert hami.rate([]) == hami.rate([float(number) for number in range(9)]) == 0.0
    assert hami.rate([float(number) for number in range(10)]) == pytest.approx(1.0)


def given(*gpus: tuple[str, int], node: str | None = "n") -> dict[str, Any]:
    """A pod as HAMi's scheduler annotates it: a container after the other, a GPU of it after the other."""
    text = ";".join(f"{uuid},NVIDIA,1000,{percent}:" for uuid, percent in gpus)
    annotations = {"hami.io/vgpu-devices-to-allocate": f"{text};"}
    return {"metadata": {"annotations": annotations}, "spec": {"nodeName": node} if node else {}}


def test_a_gpu_is_overcommitted_by_more_than_all_of_it() -> None:
    assert hami.overcommitted([given(("A", 60)), given(("A", 40)), given(("B", 100))]) == []
    assert hami.overcommitted([given(("A", 60)), given(("A", 41)), given(("B", 100))]) == ["A"]
    assert hami.overcommitted([given(("A", 50), ("B", 50)), given(("B", 60))]) == ["B"], "of several containers"
    two = given(("A", 50))
    two["metadata"]["annotations"]["hami.io/vgpu-devices-to-allocate"] = "A,NVIDIA,1,50:B,NVIDIA,1,50:;"
    assert hami.overcommitted([two, given(("B", 60))]) == ["B"], "of several GPUs for one container"


def test_pods_that_are_not_bound_or_got_nothing_overcommit_no_gpu() -> None:
    assert hami.overcommitted([given(("A", 60)), given(("A", 60), node=None)]) == []
    bare = {"metadata": {}, "spec": {"nodeName": "n"}}
    none = {"metadata": {"annotations": None}, "spec": {"nodeName": "n"}}
    assert hami.overcommitted([bare, none, given()]) == []


def test_a_pod_asks_hami_for_what_gpushares_asks_for() -> None:
    made = hami.pod("p", 25, 35_942)
    assert (made["metadata"]["name"], made["spec"]["schedulerName"]) == ("p", "hami-scheduler")
    assert "gpushare" not in str(made)
    (container,) = made["spec"]["containers"]
    asked = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "35942", "nvidia.com/gpucores": "25"}
    for part in ("limits", "requests"):
        assert asked.items() <= container["resources"][part].items()
    assert hami.pod("q", 25, 1, "nobody")["spec"]["schedulerName"] == "nobody"


def test_two_halves_of_a_gpu_fit_a_node_as_hami_registers_it() -> None:
    made = hami.node(0, 2)
    assert made["status"]["allocatable"]["nvidia.com/gpu"] == str(2 * hami.SPLIT_COUNT)
    assert fleet.gpu_uuid(0, 1) in made["metadata"]["annotations"]["hami.io/node-nvidia-register"]


@pytest.mark.parametrize(
    "command", [pytest.param(text, id=text) for _, text in commands() if text.startswith("python -m bench")]
)
def test_the_pages_arguments_are_read(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(controlplane, "missing", lambda: "nothing is started here")
    _, _, _, name, *arguments = words(command)
    with pytest.raises(SystemExit) as ended:
        PROGRAMS[name].main(arguments)
    assert ended.value.code == "nothing is started here"
