"""Steps of gate_suite.py: what the gate promises each pod, under load and attack."""

import contextlib
import os
import signal
import socket
import statistics
import subprocess
import time
from typing import Any

from gate_bench import Bench, Tenant, pod_uid, used_mib_by_pod
from gate_checks import START, must, sms_at

from gpushare.core.api import JobClass
from gpushare.mps import commands
from gpushare.mps.control import ControlProgram
from gpushare.mps.status import GateState, HoldReason, SelfTestResult

ASKS_FOR_ALL = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "100", "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": "0=100G"}


def self_test(b: Bench) -> dict[str, Any]:
    t = b.status().self_test
    must(t.result is SelfTestResult.PASSED, t.detail)
    return {"detail": t.detail, "driver": t.driver}


def ask(line: str, program: ControlProgram, **environment: str) -> subprocess.CompletedProcess[str]:
    """One command to the daemon, as its own program sends it."""
    return subprocess.run(
        program.executable,
        input=line + "\n",
        env={**program.env(), **environment},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def raw(b: Bench) -> dict[str, Any]:
    """Every command's raw answer, with and without clients, for the parsers' fixtures."""
    control = b.control()
    uid = b.decide(1, 40, 4096)
    tenant = b.spawn(uid, "run", 30, 256)
    tenant.wait("context", START)
    b.until(lambda: bool(b.client_pids(uid)), 10, "the client in the status")
    server, client = control.servers()[0], b.client_pids(uid)[0]
    lines = [
        "get_server_list",
        f"get_server_status {server}",
        f"get_client_list {server}",
        "ps",
        f"ps -p {server}",
        "get_device_client_list",
        f"get_device_client_list {server}",
        "device_query",
        "get_default_active_thread_percentage",
        f"get_active_thread_percentage {server}",
        f"get_device_pinned_mem_limit {server} 0",
        "get_default_device_pinned_mem_limit 0",
        f"set_active_thread_percentage {server} 50",
        f"set_device_pinned_mem_limit {server} 0 4096M",
        "set_default_active_thread_percentage 100",
        "set_default_client_priority 1",
        "set_default_client_priority 0",
        "start_server -uid 0",
        f"set_active_thread_percentage {server} 20\nset_device_pinned_mem_limit {server} 0 1024M",
        f"set_active_thread_percentage {server} 200",
        f"set_device_pinned_mem_limit {server} 0 bogus",
        "set_active_thread_percentage 999999 20",
        "get_client_list 999999",
        "get_server_status 999999",
        f"terminate_client {server} 999999",
        "bogus_command",
        "help",
        f"terminate_client {server} {client}",
    ]
    answers = {}
    for line in lines:
        done = ask(line, control.program)
        answers[line] = {"out": done.stdout, "err": done.stderr, "rc": done.returncode}
    done = ask("get_server_list", control.program, CUDA_MPS_PIPE_DIRECTORY="/nonexistent")
    answers["(no daemon) get_server_list"] = {"out": done.stdout, "err": done.stderr, "rc": done.returncode}
    listing = {str(p.name): oct(p.stat().st_mode) for p in b.gpu.pipe.iterdir()}
    return {"answers": answers, "pipe": listing, "terminated": tenant.end(), "its last words": tenant.events[-2:]}


def several_contexts(b: Bench) -> dict[str, Any]:
    """A process's further contexts: of a pod that named one process they wait, of one that named three they share.

    Each asks for nearly all of the pod's memory, which is one limit for the process.
    """
    alone = b.decide(1, 20, 4096)
    tenant = b.spawn(alone, "contexts", 30, 3000)
    own = tenant.wait("context", START)["sms"]
    b.until(
        lambda: any(h.pod_uid == alone and h.reason is HoldReason.POD_CAP for h in b.status().waiting_connections),
        START,
        "the second context held, and told why",
    )
    time.sleep(1)
    must(tenant.find("further") is None, f"a further context beside {own} SMs: {tenant.find('further')}")
    b.clear()
    uid = b.decide(2, 20, 4096, processes=3)
    tenant = b.spawn(uid, "contexts", 30, 3000)
    first = tenant.wait("context", START)["sms"]
    tenant.wait("contexts", START)
    if not b.twin:
        tenant.wait("together", 15)
    further = [event for event in tenant.events if event.get("event") == "further"]
    must(all(event["made"] == 0 for event in further), f"a context was not made: {further}")
    sms = [first, *(event["affinity_sms"] for event in further)]
    must(sum(sms) <= sms_at(b, 20)[1], f"{sms} SMs under a cap of 20%")
    must(not all(event["allocated"] == 0 for event in further), "three times the pod's memory")
    return {
        "alone_sms": own,
        "sms": sms,
        "together": tenant.find("together"),
        "used_mib": used_mib_by_pod(b).get(uid),
    }


def burst(b: Bench) -> dict[str, Any]:
    """24 processes of 8 tenants at once: a third of its pod's cap each, a pod's memory within its limit."""
    caps = [(18, 3072), (24, 4096), (30, 5120), (36, 6144), (45, 7168), (60, 8192), (75, 9216), (90, 10240)]
    uids = [b.decide(10 + i, *cap, processes=3) for i, cap in enumerate(caps)]
    tenants: list[tuple[int, Tenant]] = []
    for round_ in range(3):
        for i, uid in enumerate(uids):
            user = (0, 1000, 65534)[(i + round_) % 3]
            env = ASKS_FOR_ALL if (i + round_) % 2 else {}
            tenants.append((i, b.spawn(uid, "run", 600, 768, uid=user, env=env)))
    rows, wrong, over = [], [], {}
    for i, tenant in tenants:
        context = tenant.wait("context", 2 * START)
        low, high = sms_at(b, caps[i][0] // 3)
        if not low <= context["sms"] <= high:
            wrong.append((caps[i], context["sms"]))
        rows.append(
            {"cap": caps[i], "sms": context["sms"], "free_mib": context["free_mib"], "start_s": context["start_s"]}
        )
    for _, tenant in tenants:
        tenant.wait("alloc", START)
    for uid, cap in zip(uids, caps, strict=True):
        used = used_mib_by_pod(b).get(uid, 0)
        if used > cap[1]:
            over[str(cap)] = used
    must(not wrong, f"wrong SMs: {wrong}")
    must(not over, f"pods beyond their memory: {over}")
    starts = sorted(row["start_s"] for row in rows)
    return {
        "rows": rows,
        "start_s": {"first": starts[0], "median": statistics.median(starts), "last": starts[-1]},
        "turns": str(b.status().turns),
    }


def cap_of_the_pod(b: Bench) -> dict[str, Any]:
    """Five processes of one 20% pod: one at a time has its 20%; three that it names have 20% together."""
    rows: dict[str, Any] = {}
    for number, named, at_once in ((40, 1, 1), (41, 3, 3)):
        uid = b.decide(number, 20, 8192, processes=named)
        five = [b.spawn(uid, "run", 600, 64, env=ASKS_FOR_ALL if i % 2 else {}) for i in range(5)]
        b.until(lambda five=five, n=at_once: len(_contexts(five)) == n, 2 * START, f"{at_once} in")
        b.until(lambda n=at_once: _cap_in_use(b) == 5 - n, START, "the others held, and told why")
        time.sleep(2)
        sms = _contexts(five)
        must(len(sms) == at_once, f"{len(sms)} contexts of a pod that named {named} processes")
        must(sum(sms) <= sms_at(b, 20)[1], f"{sms} SMs under a cap of 20%")
        percent = sum(c.thread_percentage or 0 for c in b.status().clients if c.pod_uid == uid)
        must(percent == 20, f"ceilings of {percent}% in all")
        first = next(tenant for tenant in five if tenant.find("context"))
        os.killpg(first.process.pid, signal.SIGKILL)
        entered = b.until(lambda five=five, n=at_once: len(_contexts(five)) == n + 1, START, "the next one in")
        rows[f"{named} named"] = {"sms": sms, "next_in_s": entered, "its_sms": _contexts(five)}
        b.clear()
    return rows


def _contexts(tenants: list[Tenant]) -> list[int]:
    return [context["sms"] for tenant in tenants if (context := tenant.find("context"))]


def _cap_in_use(b: Bench) -> int:
    return sum(waiting.reason is HoldReason.POD_CAP for waiting in b.status().waiting_connections)


def two_processes(b: Bench) -> dict[str, Any]:
    """Two processes of one pod start together and want three quarters of the limit each: one gets it."""
    uid = b.decide(20, 50, 8192, processes=2)
    pair = [b.spawn(uid, "run", 60, 6144, env=ASKS_FOR_ALL) for _ in range(2)]
    got = [tenant.wait("alloc", START)["ok"] for tenant in pair]
    used = used_mib_by_pod(b).get(uid, 0)
    must(sorted(got) == [False, True], f"allocations {got}")
    must(used <= 8192, f"the pod holds {used} MiB of 8192")
    return {"allocations": got, "used_mib": used, "free_mib": [t.wait("context", 1)["free_mib"] for t in pair]}


def overrun(b: Bench) -> dict[str, Any]:
    """The older process grows later beyond what is left: the newest process of that pod is ended, nobody else."""
    uid, other = b.decide(21, 30, 8192, processes=2), b.decide(22, 30, 4096)
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
    uid = b.decide(23, 30, 2048, processes=2)
    first = b.spawn(uid, "fill", 60)
    filled = first.wait("filled", START)["mib"]
    second = b.spawn(uid, "run", 5, 256)
    b.until(lambda: second.find("error") is not None or second.find("alloc") is not None, START, "an answer")
    refusal = second.find("error") or second.find("alloc")
    must(bool(refusal) and not refusal.get("ok", False), f"it got memory: {refusal}")
    return {"first_mib": filled, "second": refusal, "used_mib": used_mib_by_pod(b).get(uid)}


def new_decision(b: Bench) -> dict[str, Any]:
    """A changed decision binds the pod's next process; the running one goes on as it was."""
    uid = b.decide(24, 20, 4096)
    old = b.spawn(uid, "run", 60, 128)
    before = old.wait("context", START)["sms"]
    b.decide(24, 60, 9000)
    after = b.spawn(uid, "run", 20, 128).wait("context", START)
    low, high = sms_at(b, 40)  # of the new 60%, what the running process leaves
    must(low <= after["sms"] <= high, f"{after['sms']} SMs under the new decision")
    must(old.is_running, "the running process ended")
    return {"before_sms": before, "after_sms": after["sms"], "after_free_mib": after["free_mib"]}


def no_decision(b: Bench) -> dict[str, Any]:
    """A pod without a decision waits, and goes on within a second of getting one."""
    tenant = b.spawn(pod_uid(25), "run", 20, 128)
    b.until(lambda: any(h.reason is HoldReason.NO_DECISION for h in b.status().waiting_connections), START, "held")
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
    must(connections <= 150, f"{connections} connections are held of the 150 that one peer made")
    must(max(starts) <= quiet + 3.0, f"neighbours start in {starts} s, alone in {quiet} s")
    must(b.state() is GateState.ACTIVE, "the daemon was touched")
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
    return {
        "through_gate_s": through,
        "direct_s": past,
        "direct_ended_by_the_gate": ended,
        "median": [statistics.median(through), statistics.median(past)],
    }


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
    b.until(
        lambda: any(h.reason is HoldReason.CLIENTS for h in b.status().waiting_connections), START, "the 49th held"
    )
    time.sleep(2)
    must(last.find("context") is None, "the 49th got in")
    left = time.time()
    os.killpg(tenants[0].process.pid, signal.SIGKILL)
    entered = last.wait("context", START)["t"] - left
    return {"48_in_s": round(all_in, 2), "49th_after_one_left_s": round(entered, 3)}


def latency_order(b: Bench) -> dict[str, Any]:
    """A latency tenant uncapped beside a capped throughput tenant, both without any env (docs/facts.md 16)."""
    uid, fast = b.decide(28, 70, 4096), b.decide(29, 100, 4096, JobClass.LATENCY)
    t = b.spawn(uid, "run", 8, 64)
    sms = t.wait("context", START)["sms"], b.spawn(fast, "run", 5, 64).wait("context", START)["sms"]
    return {"throughput_sms": sms[0], "latency_sms": sms[1]}
