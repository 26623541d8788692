"""What chart_suite.py holds gpushare to: promises of a share, beginnings, strangers, upgrades."""

import statistics
import time
from pathlib import Path

from chart_bench import GREEDY, RELEASE, RUNTIME_CLASS, ChartBench, Details, NotHere, measured, must
from livecluster import wait_for

FIRST_KERNEL_BAR, TEN_AT_ONCE_BAR = 1.1, 2.5  # seconds from apply
OUTSIDE_BAR = 2.0  # seconds from the first kernel to the event
ENDED_SECONDS = 5.0  # from the event until the kernel has ended the process
CONTEXT_MIB = 700  # what a context takes of a share before the program allocates
MIB_OF = {"8Gi": 8192, "20Gi": 20480, "2Gi": 2048, "3Gi": 3072}


def found(bench: ChartBench) -> Details:
    """Every GPU is healthy, and its self-test showed that ceilings bind."""
    gpus = bench.gpus()
    must(bench.healthy(), f"not healthy: {gpus}")
    must(all(gpu["mps"].get("ceilings") == "Enforced" for gpu in gpus), f"ceilings: {[g['mps'] for g in gpus]}")
    keys = ("model", "memoryMiB", "smCount")
    return {"gpus": [{key: gpu.get(key) for key in keys} for gpu in gpus]}


def greedy(bench: ChartBench) -> Details:
    """Pods that ask for 95% of the threads and 120 GB see their own SMs and memory, whoever they run as.

    Their environment tells them the same: their limits, and a part of the GPU's total that is free for them.
    """
    user = {"runAsUser": 1001, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    shares = {"fifth": ("0.2", "8Gi"), "most": ("0.6", "20Gi"), "user": ("0.1", "2Gi")}
    bench.start(
        bench.pod("fifth", bench.torch("memory_stream", 30, GREEDY), *shares["fifth"]),
        bench.pod("most", bench.torch("cnn_train_fp32", 30, GREEDY), *shares["most"]),
        bench.pod("user", bench.cuda("run", 20, 0, GREEDY), *shares["user"], security=user),
    )
    result: Details = {}
    sms, gpu_mib = bench.gpus()[0]["smCount"], bench.gpus()[0]["memoryMiB"]
    for name, (fraction, memory) in shares.items():
        seen = bench.until(name, "context")
        most = int(sms * float(fraction))
        must(most - 3 <= seen["sms"] <= most, f"{name} sees {seen['sms']} SMs of {sms} under {fraction}")
        limit = MIB_OF[memory]
        must(
            limit - CONTEXT_MIB <= seen["free_mib"] <= limit, f"{name} sees {seen['free_mib']} MiB under {memory}"
        )
        told = seen["told"]
        must(told.get("GPUSHARE_MEMORY_MIB") == str(limit), f"{name} is told {told}, has {memory}")
        cap = str(round(100 * float(fraction)))
        must(told.get("GPUSHARE_THREAD_PERCENTAGE") == cap, f"{name} is told {told}, has {cap}%")
        planned = float(told.get("GPUSHARE_MEMORY_FRACTION", "0")) * max(gpu_mib, seen["total_mib"])
        must(
            limit // 3 <= planned <= seen["free_mib"], f"{name} plans {planned:.0f} MiB, told {told}, sees {seen}"
        )
        result[name] = {key: seen[key] for key in ("sms", "free_mib", "total_mib", "told")}
    for name in shares:
        bench.until(name, "kernel")
    return result


def filled(bench: ChartBench) -> Details:
    """A pod that allocates all it can get stays within its share, and its neighbour does not notice."""
    bench.neighbours()
    before = bench.identity()
    bench.start(bench.pod("fill", bench.cuda("fill", 2, 0, GREEDY), "0.1", "3Gi"))
    took = bench.until("fill", "filled")["mib"]
    must(MIB_OF["3Gi"] - CONTEXT_MIB <= took <= MIB_OF["3Gi"], f"{took} MiB of 3Gi")
    return {"mib": took, "rates": bench.unharmed(before)}


def given(bench: ChartBench) -> Details:
    """A pod has the GPU of its decision, by CDI where the agent says so, and the files of no other GPU."""
    bench.start(bench.pod("given", bench.cuda("run", 20), "0.3", "4Gi"))
    bench.until("given", "kernel")
    node = bench.space.get("given")["spec"]["nodeName"]
    conditions = bench.cluster.get("gpunode", node)["status"].get("conditions", [])
    told = next((each for each in conditions if each["type"] == "GpusByCdi"), None)
    by_cdi = told is not None and told["status"] == "True"
    look = "tr '\\0' '\\n' </proc/1/environ | grep ^NVIDIA_VISIBLE_DEVICES=; ls /dev"
    lines = bench.cluster.kubectl("-n", bench.space.name, "exec", "given", "--", "sh", "-c", look).split()
    variable = lines[0].partition("=")[2]
    gpu = bench.gpu_of("given")
    # "void" too where NVIDIA's toolkit itself makes a CDI specification of the variable (its mode jit-cdi)
    must(variable in {"void", *(() if by_cdi else (gpu,))}, f"NVIDIA_VISIBLE_DEVICES={variable} although {told}")
    must(bench.sees("given") == [gpu], f"sees {bench.sees('given')} of {gpu}")
    files = sorted(name for name in lines[1:] if name.startswith("nvidia"))
    if not bench.simulated:
        numbered = [name for name in files if name.removeprefix("nvidia").isdigit()]
        must(len(numbered) == 1, f"device files {files}")
    runtime = bench.cluster.get("node", node)["status"]["nodeInfo"]["containerRuntimeVersion"]
    return {"runtime": runtime, "by_cdi": by_cdi, "variable": variable, "files": files, "told": told}


def first_kernel(bench: ChartBench) -> Details:
    """From `kubectl apply` to the first kernel: one pod after the other."""
    found = []
    for number in range(5):
        name = f"first-{number}"
        at = bench.start(bench.pod(name, bench.cuda("run", 1), "0.3", "4Gi"))
        kernel = bench.until(name, "kernel")["t"] - at
        steps = {event: round(bench.events_of(name, event)[0]["t"] - at, 2) for event in ("start", "context")}
        found.append({**steps, "kernel": round(kernel, 2)})
        bench.delete(name)
    seconds = statistics.median(one["kernel"] for one in found)
    return {"starts": found, "median": seconds, "bar": FIRST_KERNEL_BAR, "met": seconds <= FIRST_KERNEL_BAR}


def ten_at_once(bench: ChartBench) -> Details:
    """Ten pods of a tenth each, created together, on one GPU."""
    names = [f"ten-{number}" for number in range(10)]
    # below a tenth of the memory: more would raise the charged share, and the cap with it
    memory = f"{min(8192, bench.gpus()[0]['memoryMiB'] // 12)}Mi"
    at = bench.start(*(bench.pod(name, bench.cuda("run", 20), "0.1", memory) for name in names))
    kernels = sorted(round(bench.until(name, "kernel")["t"] - at, 2) for name in names)
    gpus = {bench.gpu_of(name) for name in names}
    must(len(gpus) == 1 or len(bench.gpus()) > 1, f"on {gpus}")
    sms = [bench.events_of(name, "context")[0]["sms"] for name in names]
    most = int(bench.gpus()[0]["smCount"] * 0.1)
    must(max(sms) <= most, f"SMs {sms}, allowed are {most}")
    return {
        "kernels": kernels,
        "bar": TEN_AT_ONCE_BAR,
        "met": kernels[-1] <= TEN_AT_ONCE_BAR,
        "sms": sorted(set(sms)),
    }


def outside(bench: ChartBench) -> Details:
    """A pod without a share that takes the GPU, and one that leaves its share, are named, this one ended."""
    bench.neighbours()
    # the twin's driver knows who uses which GPU by this variable
    everything = {"NVIDIA_VISIBLE_DEVICES": bench.gpus()[0]["uuid"] if bench.simulated else "all"}
    result: Details = {}
    cases = {
        "stranger": bench.pod("stranger", bench.cuda("run", 25), env=everything, runtime_class=RUNTIME_CLASS),
        "leaver": bench.pod(
            "leaver", bench.cuda("run", 25, 0, {"CUDA_MPS_PIPE_DIRECTORY": "/nowhere"}), "0.05", "2Gi"
        ),
    }
    for name, pod in cases.items():
        bench.start(pod)
        seen = bench.until(name, "kernel")
        took = measured(
            lambda name=name: wait_for(
                f"OutsideMps on {name}", lambda: "OutsideMps" in bench.reasons(name), seconds=20
            )
        )
        after = round(time.time() - seen["t"], 2)
        counted = sum(bench.metrics("gpushare_mps_outside_processes_found_total{").values())
        result[name] = {
            "sms": bench.events_of(name, "context")[0]["sms"],
            "event_after_first_kernel_s": after,
            "waited_s": took,
            "counted": counted,
            "met": after <= OUTSIDE_BAR,
        }
        must(counted >= 1, "gpushare_mps_outside_processes_found_total counts nobody")
        if name == "leaver":
            bench.until_ended(name, seconds=ENDED_SECONDS)
            must((bench.ended(name) or {}).get("exitCode") == 137, f"{name} was not killed: {bench.ended(name)}")
        bench.delete(name)
    must(not {"OutsideMps"} & bench.reasons("one"), "a tenant under MPS was called a stranger")
    result["one_on_the_way"] = bench.rate("one")
    return result


def own_threads(bench: ChartBench) -> Details:
    """A pod whose environment lowers its own threads is measured under that cap, not learnt as the whole GPU.

    In the pod's object, where the agent sees it, which the administrator has to allow; what the program itself
    sets nobody is told of.
    """
    lowered = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"}
    bench.upgrade(f"admission.allowedEnv={{{','.join(lowered)}}}")
    pod = bench.pod("low", bench.torch("cnn_train_fp32", 25), "1", workload="lowered", env=lowered)

    def admitted() -> bool:  # by an admission server that knows the new value
        return bench.cluster.apply(pod, namespace=bench.space.name).code == 0

    wait_for("the pod admitted", admitted, seconds=20)
    seen = bench.until("low", "context")
    sms = bench.gpus()[0]["smCount"]
    must(seen["sms"] <= int(sms * 0.3) + 1, f"{seen['sms']} SMs under its own 30%")
    bench.until("low", "kernel")
    time.sleep(14)  # a whole GPU's signature takes five seconds of windows
    shares = bench.cluster.get("-n", bench.space.name, "gpushares")["items"]
    profiles = [share["status"].get("profile") for share in shares if share.get("status", {}).get("profile")]
    whole = [one for one in profiles if one.get("threadPercentage", 100) == 100]
    must(not whole, f"learnt as though it had the whole GPU: {whole}")
    return {"sms": seen["sms"], "profiles": profiles}


def upgraded(bench: ChartBench) -> Details:
    """`helm upgrade --set policy.maxSlowdown=1.3` rolls our parts and leaves tenants alone."""
    bench.neighbours()
    before, agents = bench.identity(), [pod["metadata"]["uid"] for pod in bench.part("agent")]
    seconds = measured(lambda: bench.upgrade("policy.maxSlowdown=1.3", "logging.level=DEBUG"))
    wait_for(
        "a new agent",
        lambda: bench.part("agent") and [pod["metadata"]["uid"] for pod in bench.part("agent")] != agents,
        seconds=60,
    )
    rates = bench.unharmed(before)
    bench.start(bench.pod("new", bench.cuda("run", 3), "0.1", "2Gi"))
    sms = bench.until("new", "context")["sms"]
    wait_for("the GPUs healthy", bench.healthy, seconds=60)
    must(sms <= int(bench.gpus()[0]["smCount"] * 0.1), f"the newcomer sees {sms} SMs")
    return {"seconds": seconds, "rates": rates, "newcomer_sms": sms}


def two_gpus(bench: ChartBench) -> Details:
    """Fractions are packed, a whole GPU stays whole, and a fault on one GPU leaves the other's tenants alone."""
    gpus = bench.gpus()
    if len(gpus) < 2:
        raise NotHere("one GPU")
    bench.neighbours()
    bench.start(bench.pod("whole", bench.cuda("run", 200), "1"))
    bench.until("whole", "rate")
    packed, other = bench.gpu_of("one"), bench.gpu_of("whole")
    must(bench.gpu_of("two") == packed != other, "shares belong on one GPU, the whole one on the other")
    sms = bench.events_of("whole", "context")[0]["sms"]
    must(sms == gpus[0]["smCount"], f"a whole GPU of {sms} SMs")
    seen = {name: bench.sees(name) for name in ("one", "two", "whole")}
    must(
        seen == {name: [bench.gpu_of(name)] for name in seen},
        f"processes see other GPUs than their pods were given: {seen}, {packed} and {other} decided",
    )
    before = bench.identity("whole")
    bench.start(bench.pod("culprit", bench.cuda("fault", 4), "0.1", "2Gi"))
    bench.until("culprit", "faulting")
    bench.until_ended("culprit", "one", "two", seconds=60)
    wait_for("both GPUs healthy again", bench.healthy, seconds=60)
    rates = bench.unharmed(before)
    bench.delete("one", "two", "culprit")
    names = [f"half-{number}" for number in range(2)]
    bench.delete("whole")
    bench.start(*(bench.pod(name, bench.cuda("run", 20), "0.7", "8Gi") for name in names))
    for name in names:
        bench.until(name, "rate")
    must(len({bench.gpu_of(name) for name in names}) == 2, "two pods of 0.7 share a GPU")
    bench.delete(*names)  # a host that is uninstalled keeps the directories of pods
    return {"packed_on": packed, "whole_on": other, "seen": seen, "whole_through_the_fault": rates}


def uninstalled(bench: ChartBench) -> Details:
    """After `helm uninstall` no process, directory or resource of gpushare's is left on the node."""
    hosts = bench.processes("mps", "gpushare.mps")
    node = bench.cluster.get("nodes")["items"][0]["metadata"]["name"]
    seconds = measured(lambda: bench.helm("uninstall", RELEASE, "--wait", "--timeout", "90s"))
    left = Path("/run/gpushare")
    wait_for("the MPS host's end", lambda: not any(Path(f"/proc/{pid}").exists() for pid in hosts), seconds=40)
    files = sorted(str(path) for path in left.rglob("*")) if left.exists() else []
    must(not files, f"left on the node: {files[:10]}")

    def share_gone() -> bool:
        allocatable = bench.cluster.get("node", node)["status"]["allocatable"]
        return int(allocatable.get("gpushare.io/share", "0")) == 0

    wait_for("no allocatable share", share_gone, seconds=60)
    return {"seconds": seconds, "files": files}
