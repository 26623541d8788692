"""The gate and its daemon under load, attack and faults, on a real GPU or (--twin) on the twin; one JSON of
results.

    PYTHONPATH=src python3 hack/gpu/gate_suite.py [--twin] [--agent] [--only NAME,...] [--out DIR] [--faults 50]

Needs root, unshare, setpriv, writable cgroups; on a GPU also nvcc, nvidia-ml-py and prometheus-client. It changes
neither compute mode nor MIG. Every step has its own time limit; a failed one is recorded and the next one runs.

With --agent a node agent runs beside the host, between the tests' API server and kubelet: decisions come from
pods' annotations by it, and every fault is also looked at through its GpuNode and events.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import socket
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from gate_bench import SRC, Bench, Tenant, compile_tenant, pod_name, pod_uid, used_mib_by_pod
from limit import time_limit

from gpushare.core.request import JobClass
from gpushare.mps import commands
from gpushare.mps.actions import terminate_pod_clients
from gpushare.mps.identity import is_alive
from gpushare.mps.status import HoldReason, MpsState, SelfTestResult

STEP_SECONDS = 120.0
LIMITS = {"many_faults": 240.0, "clients_49": 180.0, "burst": 150.0}
START = 60.0  # seconds within which a tenant has its context even on a loaded machine
ASKS_FOR_ALL = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100G"}


class Failed(Exception):
    """What was promised did not hold."""


def must(condition: bool, text: str) -> None:
    if not condition:
        raise Failed(text)


def sms_at(bench: Bench, percentage: int) -> tuple[int, int]:
    """SMs that a ceiling allows: FACTS 7 and 11 round down to pairs; one pair of tolerance for other chips."""
    exact = bench_sms(bench) * percentage / 100
    return max(1, int(exact) - 3), max(8, int(exact) + 1)  # an H200 gives 8 SMs at 5% and below


def bench_sms(bench: Bench) -> int:
    """All SMs of the GPU, as the self-test's uncapped probe saw them."""
    found = re.search(r"of (\d+) SMs", bench.status().self_test.detail)
    return int(found[1]) if found else 132


def self_test(b: Bench) -> dict[str, Any]:
    t = b.status().self_test
    must(t.result is SelfTestResult.PASSED, t.detail)
    return {"detail": t.detail, "driver": t.driver}


def raw(b: Bench) -> dict[str, Any]:
    """Every command's raw answer, with and without clients, for the parsers' fixtures."""
    control = b.control()
    uid = b.decide(1, 40, 4096)
    tenant = b.spawn(uid, "run", 30, 256)
    tenant.wait("context", START)
    b.until(lambda: bool(b.client_pids(uid)), 10, "the client in the status")
    server, client = control.servers()[0], b.client_pids(uid)[0]
    lines = [
        "get_server_list", f"get_server_status {server}", f"get_client_list {server}", "ps", f"ps -p {server}",
        "get_device_client_list", f"get_device_client_list {server}", "device_query",
        "get_default_active_thread_percentage",
        f"get_active_thread_percentage {server}", f"get_device_pinned_mem_limit {server} 0",
        "get_default_device_pinned_mem_limit 0", f"set_active_thread_percentage {server} 50",
        f"set_device_pinned_mem_limit {server} 0 4096M", "set_default_active_thread_percentage 100",
        "set_default_client_priority 1", "set_default_client_priority 0", "start_server -uid 0",
        f"set_active_thread_percentage {server} 20\nset_device_pinned_mem_limit {server} 0 1024M",
        f"set_active_thread_percentage {server} 200", f"set_device_pinned_mem_limit {server} 0 bogus",
        "set_active_thread_percentage 999999 20", "get_client_list 999999", "get_server_status 999999",
        f"terminate_client {server} 999999", "bogus_command", "help", f"terminate_client {server} {client}",
    ]  # fmt: skip
    answers = {}
    for line in lines:
        done = subprocess.run(
            control.program.executable, input=line + "\n", env=control.program.env(), capture_output=True,
            text=True, timeout=30, check=False,
        )  # fmt: skip
        answers[line] = {"out": done.stdout, "err": done.stderr, "rc": done.returncode}
    elsewhere = {**control.program.env(), "CUDA_MPS_PIPE_DIRECTORY": "/nonexistent"}
    done = subprocess.run(
        control.program.executable, input="get_server_list\n", env=elsewhere, capture_output=True, text=True,
        timeout=30, check=False,
    )  # fmt: skip
    answers["(no daemon) get_server_list"] = {"out": done.stdout, "err": done.stderr, "rc": done.returncode}
    listing = {str(p.name): oct(p.stat().st_mode) for p in b.gpu.pipe.iterdir()}
    return {"answers": answers, "pipe": listing, "terminated": tenant.end(), "its last words": tenant.events[-2:]}


def burst(b: Bench) -> dict[str, Any]:
    """24 processes of 8 tenants at once: caps exact, memory of a pod's three processes within its limit."""
    caps = [(5, 3072), (10, 4096), (15, 5120), (20, 6144), (25, 7168), (30, 8192), (50, 9216), (80, 10240)]
    uids = [b.decide(10 + i, *cap) for i, cap in enumerate(caps)]
    tenants: list[tuple[int, Tenant]] = []
    for round_ in range(3):
        for i, uid in enumerate(uids):
            user = (0, 1000, 65534)[(i + round_) % 3]
            env = ASKS_FOR_ALL if (i + round_) % 2 else {}
            tenants.append((i, b.spawn(uid, "run", 600, 768, uid=user, env=env)))
    rows, wrong, over = [], [], {}
    for i, tenant in tenants:
        context = tenant.wait("context", 2 * START)
        low, high = sms_at(b, caps[i][0])
        if not low <= context["sms"] <= high:
            wrong.append((caps[i], context["sms"]))
        rows.append({"cap": caps[i], "sms": context["sms"], "free_mib": context["free_mib"],
                     "start_s": context["start_s"]})  # fmt: skip
    for _, tenant in tenants:
        tenant.wait("alloc", START)
    for uid, cap in zip(uids, caps, strict=True):
        used = used_mib_by_pod(b).get(uid, 0)
        if used > cap[1]:
            over[str(cap)] = used
    must(not wrong, f"wrong SMs: {wrong}")
    must(not over, f"pods beyond their memory: {over}")
    starts = sorted(row["start_s"] for row in rows)
    return {"rows": rows, "start_s": {"first": starts[0], "median": statistics.median(starts), "last": starts[-1]},
            "turns": str(b.status().turns)}  # fmt: skip


def two_processes(b: Bench) -> dict[str, Any]:
    """Two processes of one pod start together and want three quarters of the limit each: one gets it."""
    uid = b.decide(20, 50, 8192)
    pair = [b.spawn(uid, "run", 60, 6144, env=ASKS_FOR_ALL) for _ in range(2)]
    got = [tenant.wait("alloc", START)["ok"] for tenant in pair]
    used = used_mib_by_pod(b).get(uid, 0)
    must(sorted(got) == [False, True], f"allocations {got}")
    must(used <= 8192, f"the pod holds {used} MiB of 8192")
    return {"allocations": got, "used_mib": used, "free_mib": [t.wait("context", 1)["free_mib"] for t in pair]}


def overrun(b: Bench) -> dict[str, Any]:
    """The older process grows later beyond what is left: the newest process of that pod is ended, nobody else."""
    uid, other = b.decide(21, 30, 8192), b.decide(22, 30, 4096)
    neighbour = b.spawn(other, "run", 60, 512)
    neighbour.wait("context", START)
    old = b.spawn(uid, "late", 24, 5000)
    old.wait("context", START)
    new = b.spawn(uid, "run", 60, 6000)
    new.wait("alloc", START)
    old.wait("alloc", 40)
    b.until(lambda: not new.is_running, 15, "the newest process ended")
    time.sleep(1)
    must(old.is_running and neighbour.is_running, "another process ended too")
    return {
        "mismatches": [m.detail for m in b.status().mismatches][-2:],
        "new": new.events[-1:],
        "old": old.events[-1:],
    }


def exhausted(b: Bench) -> dict[str, Any]:
    """A process that comes when its pod's memory is used up gets CUDA's out of memory, soon."""
    uid = b.decide(23, 30, 2048)
    first = b.spawn(uid, "fill", 60)
    filled = first.wait("filled", START)["mib"]
    second = b.spawn(uid, "run", 5, 256)
    b.until(lambda: second.find("error") is not None or second.find("alloc") is not None, START, "an answer")
    said = second.find("error") or second.find("alloc")
    must(bool(said) and not said.get("ok", False), f"it got memory: {said}")
    return {"first_mib": filled, "second": said, "used_mib": used_mib_by_pod(b).get(uid)}


def new_decision(b: Bench) -> dict[str, Any]:
    """A changed decision binds the pod's next process; the running one goes on as it was."""
    uid = b.decide(24, 20, 4096)
    old = b.spawn(uid, "run", 60, 128)
    before = old.wait("context", START)["sms"]
    b.decide(24, 60, 9000)
    after = b.spawn(uid, "run", 20, 128).wait("context", START)
    low, high = sms_at(b, 60)
    must(low <= after["sms"] <= high, f"{after['sms']} SMs under the new decision")
    must(old.is_running, "the running process ended")
    return {"before_sms": before, "after_sms": after["sms"], "after_free_mib": after["free_mib"]}


def no_decision(b: Bench) -> dict[str, Any]:
    """A pod without a decision waits, and goes on within a second of getting one."""
    tenant = b.spawn(pod_uid(25), "run", 20, 128)
    b.until(lambda: any(h.reason is HoldReason.NO_DECISION for h in b.status().held), START, "held")
    time.sleep(2)
    must(tenant.find("context") is None, "it went on without a decision")
    b.decide(25, 30, 2048)
    asked = time.time()
    context = tenant.wait("context", START)
    low, high = sms_at(b, 30)
    must(low <= context["sms"] <= high, f"{context['sms']} SMs")
    return {"after_decision_s": round(context["t"] - asked, 3), "sms": context["sms"]}


def silent(b: Bench) -> dict[str, Any]:
    """Silent connections, control commands and half handshakes of one pod delay nobody else."""
    uid = b.decide(26, 30, 2048)
    quiet = b.spawn(uid, "run", 10, 64).wait("context", START)["start_s"]
    sockets = []
    for kind in range(150):
        s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        s.connect(str(b.gpu.control))
        with contextlib.suppress(OSError):
            if kind % 3 == 1:
                s.send(b"OUTBCRED\0")
            if kind % 3 == 2:
                s.send(b"OUTBCRED\0")
                s.send(bytes.fromhex("04000000"))
                s.send(b"quit")
        sockets.append(s)
    # Pods of their own: a second process of one pod waits for the first one's memory to settle.
    starts = [
        b.spawn(b.decide(260 + i, 30, 2048), "run", 10, 64).wait("context", START)["start_s"] for i in range(3)
    ]
    b.until(lambda: b.status().connections > 0, 10, "the connections in the status")
    connections, refused = b.status().connections, dict(b.status().refused)
    for s in sockets:
        s.close()
    must(connections <= 70, f"{connections} connections are held of one peer")
    must(b.state() is MpsState.ACTIVE, "the daemon was touched")
    return {"alone_start_s": quiet, "beside_start_s": starts, "connections": connections, "refused": refused}


def start_cost(b: Bench) -> dict[str, Any]:
    """What the gate adds to a start: one after the other through it, and past it on the daemon's own socket."""
    uid = b.decide(27, 50, 4096)
    through = []
    for i in range(8):
        t = b.spawn(b.decide(100 + i, 50, 4096), "run", 0.2)
        through.append(t.wait("context", START)["start_s"])
    control = b.control()
    server = control.servers()[0]
    control.run(commands.set_active_thread_percentage(server, 100))
    past, ended = [], 0
    for _ in range(24):
        if len(past) == 8:
            break
        stranger = b.spawn(uid, "run", 0.2, direct=True)
        start_s = context_or_end(b, stranger)
        if start_s is None:
            ended += 1  # the gate ends who is listed and had no turn, as it should; the others were faster
        else:
            past.append(start_s)
    must(len(past) >= 3, f"{len(past)} starts past the gate to compare with, {ended} ended by it")
    return {"through_gate_s": through, "direct_s": past, "direct_ended_by_the_gate": ended,
            "median": [statistics.median(through), statistics.median(past)]}  # fmt: skip


def context_or_end(b: Bench, tenant: Tenant) -> float | None:
    """Seconds until the tenant had its context; None when it ended without one."""
    b.until(lambda: tenant.find("context") is not None or not tenant.is_running, START, "a context or an end")
    time.sleep(0.2)  # its last words may still be in the pipe
    found = tenant.find("context")
    return float(found["start_s"]) if found else None


def clients_49(b: Bench) -> dict[str, Any]:
    """48 clients run; the 49th waits at the gate and gets in when one leaves."""
    tenants = [b.spawn(b.decide(200 + i, 2, 1024), "run", 600, 16) for i in range(48)]
    begun = time.time()
    for tenant in tenants:
        tenant.wait("context", 4 * START)
    all_in = time.time() - begun
    last = b.spawn(b.decide(300, 2, 1024), "run", 5, 16)
    b.until(lambda: any(h.reason is HoldReason.CLIENTS for h in b.status().held), START, "the 49th held")
    time.sleep(2)
    must(last.find("context") is None, "the 49th got in")
    left = time.time()
    os.killpg(tenants[0].process.pid, signal.SIGKILL)
    entered = last.wait("context", START)["t"] - left
    return {"48_in_s": round(all_in, 2), "49th_after_one_left_s": round(entered, 3)}


def latency_order(b: Bench) -> dict[str, Any]:
    """A latency tenant uncapped beside a capped throughput tenant, both without any env (FACTS 16)."""
    uid, fast = b.decide(28, 70, 4096), b.decide(29, 100, 4096, JobClass.LATENCY)
    t = b.spawn(uid, "run", 8, 64)
    sms = t.wait("context", START)["sms"], b.spawn(fast, "run", 5, 64).wait("context", START)["sms"]
    return {"throughput_sms": sms[0], "latency_sms": sms[1]}


# Faults


def _three(b: Bench, seconds: float = 300) -> list[Tenant]:
    tenants = [b.spawn(b.decide(400 + i, 30, 4096), "run", seconds, 64) for i in range(3)]
    for tenant in tenants:
        tenant.wait("context", START)
    b.until(lambda: len(b.status().clients) == 3, 10, "three clients in the status")
    return tenants


def _fresh_start(b: Bench) -> float:
    begun = time.time()
    context = b.spawn(b.decide(450, 20, 2048), "run", 1, 64).wait("context", START)
    low, high = sms_at(b, 20)
    must(low <= context["sms"] <= high, f"after the fault a client saw {context['sms']} SMs")
    return round(time.time() - begun, 3)


def killed_mid_kernel(b: Bench) -> dict[str, Any]:
    """kill -9 of a client whose kernel runs for long: undefined by NVIDIA; records what happens."""
    return _end_mid_kernel(b, 410, cleanly=False)


def terminated_mid_kernel(b: Bench) -> dict[str, Any]:
    """The same with terminate_client first, as gpushare evicts: neighbours must go on."""
    details = _end_mid_kernel(b, 415, cleanly=True)
    must(details["neighbours_running"] == 3, f"neighbours ended: {details}")
    return details


def _end_mid_kernel(b: Bench, number: int, *, cleanly: bool) -> dict[str, Any]:
    faults = b.status().faults
    tenants = _three(b)
    victim = b.spawn(b.decide(number, 30, 4096), "long", 20)
    victim.wait("long", START)
    pod = victim.pod or ""
    b.until(lambda: bool(b.client_pids(pod)), 10, "the victim in the status")
    pids = b.client_pids(pod)
    ended = time.time()
    if cleanly:
        answer = asyncio.run(terminate_pod_clients(b.gpu, pod))
    else:
        answer = None
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    b.until(lambda: not b.client_pids(pod), 60, "the victim gone from the list")
    gone = round(time.time() - ended, 3)
    time.sleep(12)  # a fault that follows comes seconds later
    b.until_active()
    return {"neighbours_running": sum(t.is_running for t in tenants), "victim_gone_s": gone, "answer": str(answer),
            "neighbours_said": [t.events[-1] for t in tenants], "faults": b.status().faults - faults,
            "last_fault": b.status().last_fault, "fresh_start_s": _fresh_start(b)}  # fmt: skip


def illegal_access(b: Bench) -> dict[str, Any]:
    faults = b.status().faults
    tenants = _three(b)
    culprit = b.spawn(b.decide(411, 30, 4096), "fault", 3, 64)
    culprit.wait("faulting", START)
    hit = time.time()
    b.until(lambda: not any(t.is_running for t in tenants), 60, "every client ended")
    ended = round(time.time() - hit, 3)
    b.until(lambda: b.status().faults > faults, 30, "the fault in the status")
    seen = round((b.status().last_fault_at or 0) - hit, 3)
    b.until_active()
    return {"all_ended_s": ended, "seen_s": seen, "active_again_s": round(time.time() - hit, 3),
            "said": b.status().last_fault, "neighbours_said": [t.events[-1] for t in tenants],
            "fresh_start_s": _fresh_start(b), "restarts": b.status().daemon_restarts}  # fmt: skip


def daemon_killed(b: Bench) -> dict[str, Any]:
    tenants = _three(b)
    before = b.status()
    os.kill(before.daemon_pid or 0, signal.SIGKILL)
    hit = time.time()
    waiting = b.spawn(b.decide(412, 20, 2048), "run", 2, 64)
    b.until(lambda: not any(t.is_running for t in tenants), 60, "every client ended")
    ended = round(time.time() - hit, 3)
    b.until(
        lambda: b.status().daemon_restarts > before.daemon_restarts and b.state() is MpsState.ACTIVE, 90, "restart"
    )
    healthy = round(time.time() - hit, 3)
    context = waiting.wait("context", START)
    low, high = sms_at(b, 20)
    must(low <= context["sms"] <= high, f"the client that came meanwhile saw {context['sms']} SMs: it escaped")
    return {"all_ended_s": ended, "active_again_s": healthy, "waiting_client_start_s": context["start_s"],
            "waiting_client_sms": context["sms"], "fresh_start_s": _fresh_start(b)}  # fmt: skip


def server_killed(b: Bench) -> dict[str, Any]:
    tenants = _three(b)
    before = b.status()
    os.kill(before.server_pid or 0, signal.SIGKILL)
    hit = time.time()
    b.until(lambda: not any(t.is_running for t in tenants), 60, "every client ended")
    ended = round(time.time() - hit, 3)
    b.until(
        lambda: b.status().server_pid != before.server_pid and b.state() is MpsState.ACTIVE, 90, "another server"
    )
    return {"all_ended_s": ended, "active_again_s": round(time.time() - hit, 3), "fresh_start_s": _fresh_start(b)}


def keeper_killed(b: Bench) -> dict[str, Any]:
    tenants = _three(b)
    before = b.status()
    held = b.spawn(pod_uid(413), "run", 5, 64)
    b.until(lambda: any(h.reason is HoldReason.NO_DECISION for h in b.status().held), START, "one held")
    os.kill(before.gate_pid, signal.SIGKILL)
    hit = time.time()
    queued = b.spawn(b.decide(414, 20, 2048), "run", 5, 64)
    b.until(lambda: b.status().gate_pid != before.gate_pid and b.state() is MpsState.ACTIVE, 60, "another gate")
    back = round(time.time() - hit, 3)
    sms = queued.wait("context", START)["sms"]
    low, high = sms_at(b, 20)
    must(low <= sms <= high, f"a client that came meanwhile saw {sms} SMs")
    b.decide(413, 20, 2048)
    context = held.wait("context", START)
    must(low <= context["sms"] <= high, f"the client held across the restart saw {context['sms']} SMs: it escaped")
    must(all(t.is_running for t in tenants), "a tenant ended")
    must(b.status().daemon_pid == before.daemon_pid, "another daemon")
    must({c.pid for c in before.clients} <= {c.pid for c in b.status().clients}, "the clients changed")
    return {"gate_back_s": back, "tenants_running": 3, "held_sms": context["sms"], "queued_sms": sms}


def agent_killed(b: Bench) -> dict[str, Any]:
    """kill -9 of the agent: tenants, caps and decisions stay; the next agent goes on where it ended."""
    agent = b.agent
    must(agent is not None, "runs with --agent only")
    assert agent is not None
    tenants = _three(b)
    b.until(lambda: len(_shown(b)) == 3, 30, "three tenants on the GpuNode")
    before, decided, written = b.status(), b.decisions_file(), len(agent.api.statuses)
    agent.kill()
    hit = time.time()
    queued = b.spawn(tenants[0].pod, "run", 2, 64)  # a pod's second process, while no agent runs
    low, high = sms_at(b, 30)
    sms = queued.wait("context", START)["sms"]
    must(low <= sms <= high, f"a client that came meanwhile saw {sms} SMs")
    must(b.decisions_file() == decided, "the decisions changed without an agent")
    agent.start()
    b.until(lambda: len(agent.api.statuses) > written, 60, "a GpuNode written by the next agent")
    back = round(time.time() - hit, 3)
    must(len(_shown(b)) == 3, f"its first word has the tenants {_shown(b)}")
    must(b.agent_says_healthy(), "its first word is not Healthy")
    must(b.decisions_file() == decided, "the next agent rewrote the decisions")
    must(all(t.is_running for t in tenants), "a tenant ended")
    must({c.pid for c in before.clients} <= {c.pid for c in b.status().clients}, "the clients changed")
    return {"first_word_after_s": back, "client_meanwhile_sms": sms, "fresh_start_s": _fresh_start(b)}


def _shown(b: Bench) -> list[str]:
    """The tenants that the GpuNode lists."""
    gpu = b.agent.gpu(b.gpu.uuid) if b.agent is not None else None
    return [tenant.pod_uid for tenant in gpu.tenants] if gpu is not None else []


# What a tenant must hear of its fault, by kind; a killed server's clients are told of a fault or of a restart.
TOLD = {"illegal": "GpuFault", "daemon": "MpsRestarted"}


class AgentsWord:
    """What the agent said of a fault: whether the GPU was out, when it was back, and whom it told."""

    def __init__(self, b: Bench) -> None:
        self._bench, self._agent = b, b.agent
        self.rows: list[dict[str, Any]] = []

    def before(self) -> None:
        if self._agent is not None:
            self._statuses, self._events = len(self._agent.api.statuses), len(self._agent.api.events)

    def after(self, kind: str, hit: float, pod: str | None) -> None:
        """The next client is in; the agent must soon say that the GPU is well."""
        agent, uuid = self._agent, self._bench.gpu.uuid
        if agent is None:
            return
        if not agent.is_running:
            agent.start()
        self._bench.until(self._bench.agent_says_healthy, 60, f"Healthy on the GpuNode after {kind}")
        healthy_s = round(time.time() - hit, 3)
        if kind in TOLD:
            self._bench.until(lambda: TOLD[kind] in self._told(pod), 15, f"{TOLD[kind]} told to pod {pod}")
        healths = [g.health.value for s in agent.api.statuses[self._statuses :] for g in s.gpus if g.uuid == uuid]
        self.rows.append({"kind": kind, "said_unhealthy": "Unhealthy" in healths,
                          "healthy_s": healthy_s, "told": sorted(self._told(pod))})  # fmt: skip

    def _told(self, pod: str | None) -> set[str]:
        """Reasons of events about a pod since the fault."""
        assert self._agent is not None
        news = self._agent.api.events[self._events :]
        return {event["reason"] for event in news if event["regarding"]["name"] == pod_name(pod or "")}

    def summary(self) -> dict[str, Any]:
        """By kind of fault; and that no agent ended by itself."""
        agent = self._agent
        if agent is None:
            return {}
        must(agent.is_running and agent.is_well(), "the agent is not well at the end")
        kills = sum(row["kind"] == "agent" for row in self.rows)
        must(len(agent.starts) <= 2 + kills, f"the agent was started {len(agent.starts)} times for {kills} kills")
        tracebacks = agent.log(4_000_000).count("Traceback")
        must(tracebacks == 0, f"{tracebacks} tracebacks in the agent's log")
        by_kind: dict[str, Any] = {}
        for kind in sorted({row["kind"] for row in self.rows}):
            rows = [row for row in self.rows if row["kind"] == kind]
            by_kind[kind] = {
                "n": len(rows), "said_unhealthy": sum(row["said_unhealthy"] for row in rows),
                "healthy_s_max": max(row["healthy_s"] for row in rows),
                "told": sorted({reason for row in rows for reason in row["told"]}),
            }  # fmt: skip
        return by_kind


def many_faults(b: Bench, count: int) -> dict[str, Any]:
    """Faults in a row with tenants coming all the time: healthy at the end, nothing left behind."""
    rng, done, recovery = random.Random(7), {}, []
    pids_before = _our_processes()
    kinds = ["tenant", "tenant", "illegal", "daemon", "server", "keeper", *(["agent"] if b.agent else [])]
    word = AgentsWord(b)
    for i in range(count):
        kind = rng.choice(kinds)
        done[kind] = done.get(kind, 0) + 1
        tenant = b.spawn(b.decide(500 + i % 20, 20, 2048), "fault" if kind == "illegal" else "run",
                         1.5 if kind == "illegal" else 60, 64)  # fmt: skip
        tenant.wait("context", START)
        status = b.status()
        word.before()
        hit = time.time()
        if kind == "tenant":
            os.killpg(tenant.process.pid, signal.SIGKILL)
        elif kind == "agent" and b.agent is not None:
            b.agent.kill()
            b.agent.start()  # as kubelet would
        elif kind == "illegal":
            tenant.wait("faulting", START)
        else:
            pid = {"daemon": status.daemon_pid, "server": status.server_pid, "keeper": status.gate_pid}[kind] or 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            b.until(lambda pid=pid: not is_alive(pid), 10, f"{kind} {pid} gone")
        probe = b.spawn(b.decide(600 + i % 20, 20, 2048), "run", 0.2, 16)
        context = probe.wait("context", 2 * START)
        low, high = sms_at(b, 20)
        must(low <= context["sms"] <= high, f"fault {i} ({kind}): the next client saw {context['sms']} SMs")
        recovery.append(round(time.time() - hit, 3))
        word.after(kind, hit, tenant.pod)
        tenant.end()
        probe.end()
    b.clear()
    said = word.summary()
    left = _our_processes() - pids_before
    must(b.state() is MpsState.ACTIVE, "not ACTIVE at the end")
    return {"faults": done, "recovery_s": {"median": statistics.median(recovery), "max": max(recovery)},
            "agent": said, "status": b.describe(), "processes_more_than_before": left}  # fmt: skip


def _our_processes() -> int:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=20, check=False).stdout
    return sum(
        "cuda-mps" in line or "gpushare.mps" in line or "gate_tenant" in line for line in listing.splitlines()
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--twin", action="store_true", help="on a machine without a GPU")
    parser.add_argument("--agent", action="store_true", help="with a node agent beside the host")
    parser.add_argument("--only", default="")
    parser.add_argument("--out", default=os.environ.get("OUT", "."))
    parser.add_argument("--base", default="/run/gpushare-suite")
    parser.add_argument("--faults", type=int, default=50)
    options = parser.parse_args()
    base, out = Path(options.base), Path(options.out)
    if options.twin:
        program = ["env", f"PYTHONPATH={SRC}", sys.executable, str(Path(__file__).parent / "gate_twin_tenant.py")]
        gpu_uuid = None
    else:
        program = compile_tenant(base)
        gpu_uuid = subprocess.run(
            ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True,
            timeout=60, check=True,
        ).stdout.split()[0]  # fmt: skip
    steps: list[tuple[str, Callable[[Bench], dict[str, Any]]]] = [
        (step.__name__, step)
        for step in (self_test, raw, start_cost, burst, two_processes, overrun, exhausted, new_decision,
                     no_decision, silent, latency_order, clients_49, illegal_access,
                     daemon_killed, server_killed, keeper_killed, terminated_mid_kernel, killed_mid_kernel)
    ]  # fmt: skip
    steps.append(("many_faults", lambda b: many_faults(b, options.faults)))
    wanted = [name for name in options.only.split(",") if name]
    bench = Bench(base, twin=options.twin, program=program, gpu_uuid=gpu_uuid)
    results: list[dict[str, Any]] = []
    try:
        bench.start_host()
        up = bench.until_active(120)
        results.append({"step": "host up", "ok": True, "seconds": up})
        if options.agent:
            bench.start_agent(Path("/tmp/gpushare-suite-agent"))
            steps.insert(-1, ("agent_killed", agent_killed))
        for name, step in steps:
            if wanted and name not in wanted:
                continue
            begun = time.time()
            row: dict[str, Any] = {"step": name}
            try:
                with time_limit(LIMITS.get(name, STEP_SECONDS)):
                    row["details"] = step(bench)
                row["ok"] = True
            except Exception as error:
                row.update(
                    ok=False, error=f"{type(error).__name__}: {error}", trace=traceback.format_exc()[-1500:]
                )
                row["tenants"] = [(t.pod and t.pod[-4:], t.events[-2:], t.noise[-2:]) for t in bench.tenants[:6]]
            row["seconds"] = round(time.time() - begun, 2)
            try:
                with time_limit(STEP_SECONDS):
                    bench.clear()
            except Exception as error:
                row["clear"] = str(error)
            results.append(row)
            print(json.dumps(row, default=str)[:1500], flush=True)
            (out / "gate_suite.json").write_text(json.dumps(results, indent=1, default=str))
    finally:
        bench.save_logs(out)
        bench.close()
    failed = [row["step"] for row in results if not row["ok"]]
    print(f"{len(results) - len(failed)} of {len(results)} steps hold; failed: {failed or 'none'}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
