"""Where pods go on a real kubelet, and that nothing is ever counted twice."""

import pytest
from livecluster import Namespace, decided, wait_for
from troubles import says

pytestmark = pytest.mark.e2e

BOUND_SECONDS = 15.0  # from when there is room; how soon a container starts is the machine's affair
SAY_GPU = ["sh", "-c", "echo got=$NVIDIA_VISIBLE_DEVICES; exec sleep infinity"]


def got(space: Namespace, name: str) -> str:
    """The GPU that the container itself sees."""
    text = wait_for(f"what {name} got", lambda: space.log(name), seconds=30)
    return text.strip().partition("got=")[2]


def holding(pods: list[dict]) -> list[dict]:
    """Those that hold their share: bound, and not ended (what kubelet refuses or cannot start ends as Failed)."""
    ended = ("Succeeded", "Failed")
    return [pod for pod in pods if pod["spec"].get("nodeName") and pod["status"].get("phase") not in ended]


def shares(pods: list[dict], percent: int) -> dict[str, int]:
    """Percents in use by GPU, as decided."""
    used: dict[str, int] = {}
    for pod in holding(pods):
        used[decided(pod)[0]] = used.get(decided(pod)[0], 0) + percent
    return used


def described(pods: list[dict]) -> str:
    """A line for each bound pod, for a test that fails: what became of it and when it was decided."""
    lines = []
    for pod in pods:
        metadata, status = pod["metadata"], pod["status"]
        notes = metadata.get("annotations") or {}
        facts = [notes.get("gpushare.io/gpu"), notes.get("gpushare.io/decided-at"), status.get("phase")]
        facts += [status.get("reason"), status.get("message"), status.get("startTime")]
        facts.append(metadata.get("deletionTimestamp"))
        if pod["spec"].get("nodeName"):
            lines.append(" ".join([metadata["name"], pod["spec"]["nodeName"], *map(str, facts)]))
    return "\n".join(sorted(lines))


def check_sums(pods: list[dict], percent: int) -> None:
    sums = shares(pods, percent)
    assert all(total <= 100 for total in sums.values()), f"{sums}\n{described(pods)}"


def test_three_pods_of_forty_percent_never_share_one_gpu(space: Namespace):
    space.create(*(space.tenant(f"p{number}", "0.4", command=SAY_GPU) for number in range(3)))
    pods = space.running("p0", "p1", "p2")
    assert sorted(shares(space.pods(), 40).values()) == [40, 80]
    assert [got(space, f"p{number}") for number in range(3)] == [decided(pod)[0] for pod in pods]


def test_two_of_the_same_size_at_the_same_moment_for_different_gpus_get_their_own(space: Namespace):
    for attempt in range(3):
        names = [f"a{attempt}", f"b{attempt}"]
        space.create(*(space.tenant(name, "0.6", command=SAY_GPU) for name in names))
        pods = space.running(*names)
        assert len({decided(pod)[0] for pod in pods}) == 2
        assert [got(space, name) for name in names] == [decided(pod)[0] for pod in pods]
        space.delete(*names)


def test_a_pod_that_fits_nowhere_says_how_much_is_free_where_and_starts_when_room_appears(space: Namespace):
    space.create(space.tenant("a", "0.8", command=SAY_GPU), space.tenant("b", "0.7", command=SAY_GPU))
    space.running("a", "b")
    space.create(space.tenant("waits", "0.5", command=SAY_GPU))

    def message_of_event() -> str | None:
        return next((event for event in space.events("waits") if "free" in event), None)

    message = wait_for("an event about what is free", message_of_event, seconds=30)
    assert "needs 50 percent of one GPU, the freest has 30 percent free" in message, message
    assert says("The pod waits", "needs 60% of one GPU, the freest has 25% free", message)
    assert space.get("waits")["status"]["phase"] == "Pending"
    space.delete("b")
    space.bound("waits", seconds=BOUND_SECONDS)
    space.running("waits")


def test_whole_gpus_and_fractions_do_not_mix(space: Namespace):
    space.create(space.tenant("small", "0.1", command=SAY_GPU))
    space.running("small")
    space.create(space.tenant("whole", "1", command=SAY_GPU), space.tenant("two", "2", command=SAY_GPU))
    (whole,) = space.running("whole")
    assert decided(whole)[0] != decided(space.get("small"))[0]

    def whole_gpus_told() -> str | None:
        return next((event for event in space.events("two") if "whole GPUs" in event), None)

    message = wait_for("an event about the other", whole_gpus_told, seconds=30)
    assert says("The pod waits", "needs 2 whole GPUs, has 1 free", message)
    space.delete("whole", "small")
    space.bound("two", seconds=BOUND_SECONDS)
    (two,) = space.running("two")
    assert len(two["metadata"]["annotations"]["gpushare.io/gpu"].split(",")) == 2


@pytest.mark.timeout(420)
def test_sums_never_pass_a_hundred_under_a_burst_of_fifty(space: Namespace):
    names = [f"p{number}" for number in range(50)]
    space.create(*(space.tenant(name, "0.07", command=SAY_GPU) for name in names))

    def settled() -> bool:
        pods = space.pods()
        check_sums(pods, 7)
        phases = [pod["status"].get("phase") for pod in pods]
        return phases.count("Running") == 28  # 14 of 7% fit on each of two GPUs

    wait_for("28 of them running", settled, seconds=240, every=1.0)
    running = [pod for pod in space.pods() if pod["status"].get("phase") == "Running"]
    for pod in running:
        assert got(space, pod["metadata"]["name"]) == decided(pod)[0]
    space.delete(*(pod["metadata"]["name"] for pod in running[:10]))

    def filled() -> bool:
        pods = space.pods()
        check_sums(pods, 7)
        return sum(pod["status"].get("phase") == "Running" for pod in pods) == 28

    wait_for("ten more of them running", filled, seconds=120, every=1.0)
