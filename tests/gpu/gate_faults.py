"""Steps of gate_suite.py: what is killed or goes wrong, who feels it, and how long until all is well again."""

import contextlib
import os
import random
import signal
import statistics
import subprocess
import time
from typing import Any

from gate_bench import Bench, Tenant, pod_name, pod_uid
from gate_checks import START, must, sms_at

from gpushare.mps import commands
from gpushare.mps.actions import sync_control
from gpushare.mps.identity import is_alive
from gpushare.mps.status import GateState, HoldReason

NEWCOMERS = 16  # of one round
NEWCOMER_ROUNDS = 8


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
    """The same with terminate_client, as the gate does where it may not send signals: neighbours must go on."""
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
    control = sync_control(b.gpu)
    (server,) = control.servers()
    for pid in pids:
        if cleanly:
            control.run(commands.terminate_client(server, pid))
        else:
            os.kill(pid, signal.SIGKILL)
    b.until(lambda: not b.client_pids(pod), 60, "the victim gone from the list")
    gone = round(time.time() - ended, 3)
    time.sleep(12)  # a fault that follows comes seconds later
    b.until_active()
    return {
        "neighbours_running": sum(t.is_running for t in tenants),
        "victim_gone_s": gone,
        "neighbours_said": [t.events[-1] for t in tenants],
        "faults": b.status().faults - faults,
        "last_fault": b.status().last_fault,
        "fresh_start_s": _fresh_start(b),
    }


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
    return {
        "all_ended_s": ended,
        "seen_s": seen,
        "active_again_s": round(time.time() - hit, 3),
        "said": b.status().last_fault,
        "neighbours_said": [t.events[-1] for t in tenants],
        "fresh_start_s": _fresh_start(b),
        "restarts": b.status().daemon_restarts,
    }


def newcomers(b: Bench) -> dict[str, Any]:
    """Clients that connect around a fault, before the keeper's look: each works, or is told of the fault."""
    pods = [b.decide(700 + number, 5, 1024) for number in range(NEWCOMERS)]
    rounds: list[dict[str, Any]] = []
    for number in range(NEWCOMER_ROUNDS):
        faults = b.status().faults
        culprit = b.spawn(b.decide(690, 20, 2048), "fault", 0.8, 64)
        culprit.wait("context", START)
        came = []
        for pod in pods:
            came.append(b.spawn(pod, "run", 0.1, 16))
            time.sleep(0.1 + 0.013 * number)  # so that rounds differ in when they connect
        b.until(lambda faults=faults: b.status().faults > faults, 30, "the fault in the status")
        b.until(lambda came=came: not any(t.is_running for t in came), START, "every newcomer ended")
        told = set(b.status().last_fault_pods)
        failed = [t for t in came if t.find("end") is None]
        rounds.append(
            {
                "failed": len(failed),
                "told": sum(t.pod in told for t in failed),
                "untold": [t.events[-1] for t in failed if t.pod not in told],
                "noticed_s": round((b.status().last_fault_at or 0) - culprit.wait("faulting", START)["t"], 3),
            }
        )
        b.until_active()
    untold = sum(len(row["untold"]) for row in rounds)
    must(not untold, f"{untold} clients failed and were told of no fault: {rounds}")
    return {"rounds": rounds, "fresh_start_s": _fresh_start(b)}


def daemon_killed(b: Bench) -> dict[str, Any]:
    tenants = _three(b)
    before = b.status()
    os.kill(before.daemon_pid or 0, signal.SIGKILL)
    hit = time.time()
    waiting = b.spawn(b.decide(412, 20, 2048), "run", 2, 64)
    b.until(lambda: not any(t.is_running for t in tenants), 60, "every client ended")
    ended = round(time.time() - hit, 3)
    b.until(
        lambda: b.status().daemon_restarts > before.daemon_restarts and b.state() is GateState.ACTIVE,
        90,
        "restart",
    )
    healthy = round(time.time() - hit, 3)
    context = waiting.wait("context", START)
    low, high = sms_at(b, 20)
    must(low <= context["sms"] <= high, f"the client that came meanwhile saw {context['sms']} SMs: it escaped")
    return {
        "all_ended_s": ended,
        "active_again_s": healthy,
        "waiting_client_start_s": context["start_s"],
        "waiting_client_sms": context["sms"],
        "fresh_start_s": _fresh_start(b),
    }


def server_killed(b: Bench) -> dict[str, Any]:
    tenants = _three(b)
    before = b.status()
    os.kill(before.server_pid or 0, signal.SIGKILL)
    hit = time.time()
    b.until(lambda: not any(t.is_running for t in tenants), 60, "every client ended")
    ended = round(time.time() - hit, 3)
    b.until(
        lambda: b.status().server_pid != before.server_pid and b.state() is GateState.ACTIVE, 90, "another server"
    )
    return {"all_ended_s": ended, "active_again_s": round(time.time() - hit, 3), "fresh_start_s": _fresh_start(b)}


def keeper_killed(b: Bench) -> dict[str, Any]:
    tenants = _three(b)
    before = b.status()
    undecided = b.spawn(pod_uid(413), "run", 5, 64)
    b.until(
        lambda: any(h.reason is HoldReason.NO_DECISION for h in b.status().waiting_connections), START, "one held"
    )
    os.kill(before.gate_pid, signal.SIGKILL)
    hit = time.time()
    queued = b.spawn(b.decide(414, 20, 2048), "run", 5, 64)
    b.until(lambda: b.status().gate_pid != before.gate_pid and b.state() is GateState.ACTIVE, 60, "another gate")
    back = round(time.time() - hit, 3)
    sms = queued.wait("context", START)["sms"]
    low, high = sms_at(b, 20)
    must(low <= sms <= high, f"a client that came meanwhile saw {sms} SMs")
    b.decide(413, 20, 2048)
    context = undecided.wait("context", START)
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
    late = b.decide(403, 30, 2048)
    b.until(lambda: len(_shown(b)) == 4, 30, "four tenants on the GpuNode")
    before, decided, written = b.status(), b.decisions_file(), len(agent.api.statuses)
    agent.kill()
    hit = time.time()
    queued = b.spawn(late, "run", 2, 64)  # a decided pod's first process, while no agent runs
    low, high = sms_at(b, 30)
    sms = queued.wait("context", START)["sms"]
    must(low <= sms <= high, f"a client that came meanwhile saw {sms} SMs")
    must(b.decisions_file() == decided, "the decisions changed without an agent")
    agent.start()
    b.until(lambda: len(agent.api.statuses) > written, 60, "a GpuNode written by the next agent")
    back = round(time.time() - hit, 3)
    must(len(_shown(b)) == 4, f"its first word has the tenants {_shown(b)}")
    must(b.agent_says_healthy(), "its first word is not Healthy")
    must(b.decisions_file() == decided, "the next agent rewrote the decisions")
    must(all(t.is_running for t in tenants), "a tenant ended")
    must({c.pid for c in before.clients} <= {c.pid for c in b.status().clients}, "the clients changed")
    return {"first_word_after_s": back, "client_meanwhile_sms": sms, "fresh_start_s": _fresh_start(b)}


def _shown(b: Bench) -> list[str]:
    """The tenants that the GpuNode lists."""
    gpu = b.agent.gpu(b.gpu.uuid) if b.agent is not None else None
    return [tenant.pod_uid for tenant in gpu.tenants] if gpu is not None else []


# What a tenant must hear of its fault, by kind.
TOLD = {"illegal": "GpuFault", "daemon": "MpsRestarted", "server": "MpsRestarted"}


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
        self.rows.append(
            {
                "kind": kind,
                "said_unhealthy": "Unhealthy" in healths,
                "healthy_s": healthy_s,
                "told": sorted(self._told(pod)),
            }
        )

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
                "n": len(rows),
                "said_unhealthy": sum(row["said_unhealthy"] for row in rows),
                "healthy_s_max": max(row["healthy_s"] for row in rows),
                "told": sorted({reason for row in rows for reason in row["told"]}),
            }
        return by_kind


def many_faults(b: Bench, count: int, seconds: float) -> dict[str, Any]:
    """Faults in a row with tenants coming all the time: healthy at the end, nothing left behind.

    It ends after `seconds` also with fewer, and says how many there were.
    """
    deadline = time.time() + seconds
    rng, done, recovery = random.Random(7), {}, []
    pids_before = _our_processes()
    kinds = ["tenant", "tenant", "illegal", "daemon", "server", "keeper", *(["agent"] if b.agent else [])]
    word = AgentsWord(b)
    for i in range(count):
        if time.time() > deadline:
            break
        kind = rng.choice(kinds)
        done[kind] = done.get(kind, 0) + 1
        tenant = b.spawn(
            b.decide(500 + i % 20, 20, 2048),
            "fault" if kind == "illegal" else "run",
            1.5 if kind == "illegal" else 60,
            64,
        )
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
    agent_summary = word.summary()
    left = _our_processes() - pids_before
    must(b.state() is GateState.ACTIVE, "not ACTIVE at the end")
    return {
        "faults": done,
        "together": sum(done.values()),
        "recovery_s": {"median": statistics.median(recovery), "max": max(recovery)},
        "agent": agent_summary,
        "status": b.describe(),
        "processes_more_than_before": left,
    }


def _our_processes() -> int:
    listing = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, timeout=20, check=False).stdout
    return sum(
        "cuda-mps" in line or "gpushare.mps" in line or "gate_tenant" in line for line in listing.splitlines()
    )
