"""What single panels count, as promtool reckons their queries over series that one can count by hand."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

import yaml
from boards import BOARDS
from realprometheus import promtool


def _queries(board: str, panel: str, **chosen: str) -> list[str]:
    [found] = [each for each in BOARDS[board]["panels"] if each["title"] == panel]
    return [re.sub(r"\$([a-z]+)", lambda m: chosen.get(m[1], ".+"), each["expr"]) for each in found["targets"]]


def _values(run: float | str) -> str:
    return run if isinstance(run, str) else f"{run}+0x20"


def _reckoned(folder: Path, series: Mapping[str, float | str], expected: Mapping[str, float]) -> None:
    """Let promtool compare each query's only value with the expected one."""
    case = {
        "interval": "30s",
        "input_series": [{"series": name, "values": _values(value)} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": query, "eval_time": "10m", "exp_samples": [{"labels": "{}", "value": value}]}
            for query, value in expected.items()
        ],
    }
    suite = folder / "tests.yaml"
    suite.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "30s", "tests": [case]}))
    done: subprocess.CompletedProcess[str] = promtool("test", "rules", str(suite))
    assert done.returncode == 0, done.stdout + done.stderr


def _gain(
    folder: Path, series: Mapping[str, float], *, progress: float, known: int, in_use: int, spared: float
) -> None:
    """Compare what each panel of the gain says; of a known GPU the progress of every pod is known."""
    [per_gpu] = _queries("gpushare", "What does a used GPU do?")
    [saved] = _queries("gpushare", "How many GPUs does sharing spare?")
    done, of_known, used, _ = _queries("gpushare", "Work done against GPUs in use")
    expected = {per_gpu: progress / known, saved: spared, done: progress, of_known: known, used: in_use}
    _reckoned(folder, series, expected)
    [by_gpu] = _queries("gpushare-node", "Summed progress")
    _reckoned(folder, series, {f"sum({by_gpu})": progress, f"count({by_gpu})": known})


def _pod(family: str, gpu: str, pod: str) -> str:
    return f'gpushare_pod_{family}{{node="n",gpu_uuid="{gpu}",namespace="ml",pod="{pod}",pod_uid="{pod}"}}'


def test_the_gain_counts_only_gpus_on_which_every_pods_progress_is_known(tmp_path: Path) -> None:
    """Four pods on one GPU; a pod of two whole GPUs (ADR 0030); a pod without a profile beside one with."""
    shared = {_pod("share_ratio", "S", f"s{at}"): 0.25 for at in range(4)}
    made = {_pod("progress_ratio", "S", f"s{at}"): 0.75 for at in range(4)}
    whole = {_pod("share_ratio", gpu, "train"): 1.0 for gpu in ("W0", "W1")}
    mixed = {_pod("share_ratio", "M", pod): 0.5 for pod in ("known", "new")}
    series = shared | made | whole | mixed | {_pod("progress_ratio", "M", "known"): 0.5}
    _gain(tmp_path, series, progress=3, known=1, in_use=4, spared=2)


def test_a_pod_without_a_process_does_nothing_and_leaves_its_gpus_work_known(tmp_path: Path) -> None:
    """A notebook beside two trainers; one alone; one beside a pod without a profile."""
    shares = {_pod("share_ratio", "S", f"s{at}"): 0.4 for at in range(2)} | {_pod("share_ratio", "M", "new"): 0.5}
    notebooks = {_pod("share_ratio", gpu, f"notebook-{gpu}"): 0.2 for gpu in "SIM"}
    clients = {name.replace("share_ratio", "clients"): 0.0 for name in notebooks}
    clients |= {name.replace("share_ratio", "clients"): 1.0 for name in shares}
    made = {_pod("progress_ratio", "S", f"s{at}"): 0.75 for at in range(2)}
    series = shares | notebooks | clients | made
    _gain(tmp_path, series, progress=1.5, known=1, in_use=3, spared=0.5)


def test_the_gates_panels_show_only_the_chosen_nodes_gpus(tmp_path: Path) -> None:
    """The gate's families have no node, and "All" of the GPUs is `.+`."""
    series: dict[str, float] = {}
    for node, gpu, count in (("n", "A", 1), ("n", "B", 2), ("m", "C", 4)):
        series[f'gpushare_gpu_healthy{{node="{node}",gpu_uuid="{gpu}"}}'] = 1
        for family in ("throttled_pods", "connections", "unread_connections"):
            series[f'gpushare_gate_{family}{{gpu_uuid="{gpu}"}}'] = count
    pods, _, _ = _queries("gpushare-node", "Throttling by the host", node="n")
    sockets = _queries("gpushare-node", "Sockets at the gate", node="n")
    _reckoned(tmp_path, series, dict.fromkeys((pods, *sockets), 3))
    one = _queries("gpushare-node", "Sockets at the gate", node="n", gpu="A")
    every = _queries("gpushare-node", "Sockets at the gate")
    _reckoned(tmp_path, series, dict.fromkeys(one, 1) | dict.fromkeys(every, 7))


def test_the_gates_panels_go_on_while_their_agent_is_away(tmp_path: Path) -> None:
    gone = {'gpushare_gpu_healthy{node="n",gpu_uuid="A"}': "1+0x4 stale"}
    sockets = _queries("gpushare-node", "Sockets at the gate", node="n")
    gate = {f'gpushare_gate_{family}{{gpu_uuid="A"}}': 2.0 for family in ("connections", "unread_connections")}
    _reckoned(tmp_path, gone | gate, dict.fromkeys(sockets, 2))


def test_broken_objects_are_counted_once_though_three_parts_see_them(tmp_path: Path) -> None:
    """A counter of readings grows with each write of one of them; the panel leaves it alone."""
    seen = {"operator_bad_objects": {"operator": 1}, "extender_present_bad_objects": {"a": 2, "b": 2}}
    series: dict[str, float] = {
        f'gpushare_{family}{{pod="{pod}",kind="Pod"}}': count
        for family, parts in seen.items()
        for pod, count in parts.items()
    }
    nodes = {'gpushare_operator_bad_objects{pod="operator",kind="GpuNode"}': 1.0}
    written = {'gpushare_extender_bad_objects_total{pod="a",resource="pods"}': 360.0}
    [broken] = _queries("gpushare-control", "Is anything broken seen?")
    _reckoned(tmp_path, series | nodes | written, {broken: 3})
    mended = dict.fromkeys(series | nodes, 0.0)
    _reckoned(tmp_path, mended | written, {broken: 0})
