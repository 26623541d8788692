"""The loop on a GPU: jobs share it, a newcomer breaks a promise, and the agent throttles until it is kept again.

    python3 tests/gpu/loop_suite.py --out DIR [--only NAME ...] [--seconds 45]
    python3 tests/gpu/loop_suite.py --out DIR --simulated        # the twin's tenants, on any machine, as root

The MPS host (gate, throttle, real freezer) and the node agent run as processes, as they are deployed; jobs are
ordinary programs in cgroups named as kubelet names them. First each program runs alone, so that the agent takes
its signature and we its rate; then the scenes. `loop.json` has both sides of every second: what each job counted
itself and what the agent's metrics said, and of each step of the agent's loop what it acted by, from its log
(`steps`, which agent.log has too); `loop.md` the table. Needs root and writable cgroups.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agent_bench import ids_of, pod_of, wait_until
from counts import rate_of
from gate_bench import Bench, pod_name, pod_uid, python_path
from limit import OutOfTimeError, time_limit
from loop_steps import steps_of

from gpushare.core.api import JobClass, to_json
from gpushare.devices.nvml import NvmlDevices
from gpushare.mps.layout import decisions_reader
from gpushare.runtime.logs import LOG_LEVEL

HERE = Path(__file__).parent
PROGRESS, PROMISE, THROTTLE = (f"gpushare_pod_{name}_ratio" for name in ("progress", "promise", "throttle"))
WINDOW_SECONDS = 2.0  # over which a job's own progress is told: two periods of the throttle
TOLERANCE = 0.02  # of progress: what counting over such a window errs by
SETTLED_SECONDS = 5.0  # a promise is kept again once it was for so long


@dataclass(frozen=True)
class Role:
    """One job of a scene; `joins` is when, in seconds from the scene's begin."""

    program: str
    share: int
    cap: int = 100
    job_class: JobClass = JobClass.THROUGHPUT
    joins: float = 0.0


@dataclass(frozen=True)
class Scene:
    name: str
    roles: tuple[Role, ...]


GPU_SCENES = (
    Scene(
        "latency",
        (
            Role("cnn_inference_b1", 30, job_class=JobClass.LATENCY),
            Role("fft", 20, cap=50),
            Role("tiny", 10, cap=30),
            Role("cnn_train_fp32", 30, joins=12.0),
        ),
    ),
    Scene(
        "training",
        (
            Role("cnn_train_fp32", 60),
            Role("cnn_inference_b1", 15),
            Role("tiny", 5),
            Role("fp16_product", 20, joins=12.0),
        ),
    ),
)
# Alone for longer: until the agent knows that a program hardly uses the GPU; what hangs on the host's speed.
ALONE_SECONDS = {"tiny": 40.0, "cnn_inference_b1": 18.0}
TWIN_SCENES = (
    Scene("training", (Role("bert-infer", 40), Role("dlrm-infer", 20), Role("resnet50-train", 20, joins=10.0))),
)


@dataclass
class Job:
    """A program in a pod's cgroup, and what it counted itself."""

    role: Role
    number: int
    started_at: float = 0.0
    counts: list[tuple[float, float]] = field(default_factory=list)  # monotonic seconds, iterations
    lines: int = 0  # of the twin's tenant, which says its rate once a second
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def uid(self) -> str:
        return pod_uid(self.number)

    @property
    def pod(self) -> str:
        return pod_name(self.uid)

    def rate(self, begin: float, end: float) -> float | None:
        """Iterations per second between two times, None where it was not counting for most of it."""
        return rate_of(self.counts, begin, end)


class Stage:
    """A GPU with host and agent; jobs come and go."""

    def __init__(self, bench: Bench, work: Path) -> None:
        self.bench, self.work = bench, work
        self.jobs: list[Job] = []
        self.seen: list[dict[str, Any]] = []
        self.counters: list[dict[str, Any]] = []
        self.devices = None if bench.twin else NvmlDevices.open(time.monotonic, polls_clock=True)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def start(self, role: Role, number: int) -> Job:
        bench, job = self.bench, Job(role, number)
        pod = pod_of(
            job.pod,
            bench.gpu.uuid,
            uid=job.uid,
            threads=role.cap,
            memory_mib=18_000,  # four of them fit on 80 GB
            share=role.share,
            node="bench",
            CLASS=role.job_class.value,
            WORKLOAD=role.program,
            FRACTION=f"{role.share / 100:g}",
        )
        assert bench.agent is not None
        bench.agent.admit(pod, ids_of(bench.gpu.uuid, number, role.share))
        decided = decisions_reader(bench.gpu)
        wait_until(lambda: job.uid in decided.read().pods, 30, "the agent's decision on the node")
        job.started_at = time.monotonic()
        job.process = subprocess.Popen(
            [
                "sh",
                "-c",
                "".join(f"echo $$ > {group}/cgroup.procs; " for group in groups(job.uid)) + self._command(job),
            ],
            stdout=(self.work / f"{job.number}.out").open("wb"),
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path()},
            start_new_session=True,
        )
        self.jobs.append(job)
        return job

    def end(self, job: Job) -> None:
        """The program ends by itself, as a busy client that is killed would end its neighbours; then the pod."""
        assert self.bench.agent is not None
        assert job.process is not None
        job.process.terminate()
        try:
            job.process.wait(20)
        except subprocess.TimeoutExpired:
            job.process.kill()
            job.process.wait(20)
        self.bench.agent.remove(job.pod)
        self.jobs.remove(job)
        wait_until(lambda: not self.bench.client_pids(job.uid), 20, "its clients gone")

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)
        for job in self.jobs:
            if job.process is not None:
                job.process.kill()

    def _command(self, job: Job) -> str:
        env = f"CUDA_MPS_PIPE_DIRECTORY={self.bench.gpu.tenant} OMP_NUM_THREADS=2 "
        if self.bench.twin:
            return f"exec env {env} {sys.executable} -m gpushare.twin.mps.tenant --workload {job.role.program}"
        env += f"CUDA_VISIBLE_DEVICES={self.bench.gpu.uuid} "
        rates = f"--rate-file {self.work / f'{job.number}.rate'}"
        return f"exec env {env} {sys.executable} {HERE / 'programs.py'} {job.role.program} 3600 {rates}"

    def _look(self) -> None:
        """Four times a second: each job's own count; once a second: what the agent says."""
        next_ask = next_sample = 0.0
        while not self._over.wait(0.2):
            now = time.monotonic()
            for job in list(self.jobs):
                self._count(job, now)
            agent = self.bench.agent
            if now >= next_sample and self.devices is not None:
                next_sample = now + 1.0
                sample = self.devices.sample(self.bench.gpu.uuid)
                if sample is not None:
                    self.counters.append(
                        {
                            "at": now,
                            "seconds": sample.window_seconds,
                            "sm_clock_mhz": sample.sm_clock_mhz,
                            **sample.counters.as_dict(),
                        }
                    )
            if now >= next_ask and agent is not None:
                next_ask = now + 0.5
                text = agent.metrics()
                self.seen.append(
                    {"at": now, **{family: figures_of(text, family) for family in (PROGRESS, PROMISE, THROTTLE)}}
                )

    def _count(self, job: Job, now: float) -> None:
        if self.bench.twin:
            found = re.findall(
                r"iterations/s=(\S+)", (self.work / f"{job.number}.out").read_text(errors="replace")
            )
            if len(found) > job.lines:
                job.lines = len(found)
                before = job.counts[-1][1] if job.counts else 0.0
                since = now - job.counts[-1][0] if job.counts else 1.0
                job.counts.append((now, before + float(found[-1]) * since))
            return
        try:
            at, count = (self.work / f"{job.number}.rate").read_text().split()
        except (OSError, ValueError):
            return
        if not job.counts or float(at) > job.counts[-1][0]:
            job.counts.append((float(at), float(count)))


def figures_of(text: str, family: str) -> dict[str, float]:
    """One family of a pod's figures, by pod."""
    pattern = rf'^{family}{{.*\bpod="([^"]*)".*}} (\S+)$'
    return {pod: float(value) for pod, value in re.findall(pattern, text, re.MULTILINE)}


def groups(uid: str) -> list[Path]:
    """The pod's container's cgroup in every hierarchy that the gate and the freezer look at."""
    top = Path("/sys/fs/cgroup")
    roots = [top] if (top / "cgroup.procs").exists() else [top / "pids", top / "freezer"]
    found = [root / "gpushare-suite" / "kubepods" / "besteffort" / f"pod{uid}" / "c1" for root in roots]
    for group in found:
        group.mkdir(parents=True, exist_ok=True)
    return found


def alone(stage: Stage, program: str, number: int, seconds: float) -> dict[str, Any]:
    """A program's rate alone, uncapped; meanwhile the agent takes its signature."""
    job = stage.start(Role(program, 100), number)
    try:
        wait_until(lambda: len(job.counts) > 1, 120, f"{program} counting")
        begin = time.monotonic() + 1.0
        time.sleep(seconds)
        end = time.monotonic()
        return {
            "program": program,
            "iterations_per_s": job.rate(begin, end),
            "signature": published(stage, job),
            "counters": [c for c in stage.counters if begin <= c["at"] <= end],
        }
    finally:
        stage.end(job)


def published(stage: Stage, job: Job) -> Any:
    """The signature that the agent has published for a job, as its GpuNode said it last."""
    agent = stage.bench.agent
    gpu = agent.gpu(stage.bench.gpu.uuid) if agent is not None else None
    found = [tenant.profile for tenant in gpu.tenants if tenant.pod_uid == job.uid] if gpu is not None else []
    return to_json(found[0]) if found and found[0] is not None else None


def play(stage: Stage, scene: Scene, rates: Mapping[str, float], seconds: float, first: int) -> dict[str, Any]:
    """Let a scene run; who counted what and what the agent said of it, second by second."""
    begin = time.monotonic()
    agent = stage.bench.agent
    assert agent is not None
    told = len(agent.api.events)
    jobs: list[Job] = []
    try:
        for number, role in enumerate(sorted(scene.roles, key=lambda each: each.joins), first):
            if role.joins:  # from when those before it count
                wait_until(lambda: all(len(job.counts) > 1 for job in jobs), 120, "everyone before counting")
                time.sleep(role.joins)
            jobs.append(stage.start(role, number))
        newest = jobs[-1]
        wait_until(lambda: len(newest.counts) > 1, 120, "the newcomer counting")
        time.sleep(seconds)
        end = time.monotonic()
        joined = newest.counts[0][0]
        return {
            "scene": scene.name,
            "jobs": [{**asdict(job.role), "pod": job.pod} for job in jobs],
            "newcomer_at": joined - begin,
            "series": series(stage, jobs, rates, begin, end),
            "counters": [{**c, "at": c["at"] - begin} for c in stage.counters if begin <= c["at"] <= end],
            "counts": {job.role.program: [(at - begin, count) for at, count in job.counts] for job in jobs},
            "steps": steps_of(agent.log(sys.maxsize), {job.uid: job.role.program for job in jobs}, begin, end),
            "restored": {job.role.program: restored(stage, job, rates, joined, end) for job in jobs[:-1]},
            "events": [
                {"reason": event["reason"], "pod": event["regarding"]["name"], "note": event.get("note", "")}
                for event in agent.api.events[told:]
            ],
        }
    finally:
        for job in reversed(jobs):
            if job in stage.jobs:
                stage.end(job)


def series(
    stage: Stage, jobs: Sequence[Job], rates: Mapping[str, float], begin: float, end: float
) -> list[dict[str, Any]]:
    """Each second of a scene: true and inferred progress, promise and throttle of each job."""
    rows = []
    at = begin
    while at <= end:
        seen = next((each for each in reversed(stage.seen) if each["at"] <= at), None)
        rows.append(
            {
                "at": round(at - begin, 2),
                "jobs": {
                    job.role.program: {
                        "true": progress(job, rates, at),
                        "inferred": seen and seen[PROGRESS].get(job.pod),
                        "promise": seen and seen[PROMISE].get(job.pod),
                        "throttle": seen and seen[THROTTLE].get(job.pod),
                    }
                    for job in jobs
                },
            }
        )
        at += 1.0
    return rows


def progress(job: Job, rates: Mapping[str, float], at: float) -> float | None:
    """True progress over the window that ends at a time."""
    rate = job.rate(at - WINDOW_SECONDS, at)
    return None if rate is None else round(rate / rates[job.role.program], 4)


def restored(stage: Stage, job: Job, rates: Mapping[str, float], joined: float, end: float) -> dict[str, Any]:
    """When a job's promise was broken after the newcomer came, and when it was kept again for good."""
    promise = next((s[PROMISE][job.pod] for s in reversed(stage.seen) if job.pod in s[PROMISE]), None)
    if promise is None:
        return {"promise": None}
    times = [joined + 0.25 * step for step in range(int((end - joined) / 0.25))]
    below = [at for at in times if (p := progress(job, rates, at)) is not None and p < promise - TOLERANCE]
    if not below:
        return {"promise": promise, "broken": False}
    kept = next(
        (at for at in times if at > below[0] and not any(at <= b < at + SETTLED_SECONDS for b in below)), None
    )
    return {
        "promise": promise,
        "broken": True,
        "broken_after_s": round(below[0] - joined, 2),
        "kept_again_after_s": None if kept is None or kept + SETTLED_SECONDS > end else round(kept - below[0], 2),
        "seconds_below": 0.25 * len(below),
        "lowest": min(p for at in below if (p := progress(job, rates, at)) is not None),
    }


def table(result: Mapping[str, Any]) -> str:
    """What a person reads first."""
    lines = [
        "| scene | job | promise | lowest | broken after, s | kept again after, s | seconds below |",
        "|---|---|---|---|---|---|---|",
    ]
    for scene in result["scenes"]:
        if "restored" not in scene:
            lines.append(f"| {scene['scene']} | {scene.get('error')} | | | | | |")
            continue
        for program, found in scene["restored"].items():
            cells = [
                found.get(key)
                for key in ("promise", "lowest", "broken_after_s", "kept_again_after_s", "seconds_below")
            ]
            lines.append(
                f"| {scene['scene']} | {program} | "
                + " | ".join("" if c is None else f"{c:.2f}" for c in cells)
                + " |"
            )
        errors = [
            abs(each["true"] - each["inferred"])
            for row in scene["series"]
            for each in row["jobs"].values()
            if each["true"] is not None and each["inferred"] is not None
        ]
        if errors:
            lines.append(
                f"| {scene['scene']} | mean error of inference {sum(errors) / len(errors):.3f} | | | | | |"
            )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--simulated", action="store_true")
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=45.0, help="of a scene, after the newcomer counts")
    parser.add_argument("--alone-seconds", type=float, default=12.0)
    read = parser.parse_args()
    read.out.mkdir(parents=True, exist_ok=True)
    uuid = None
    if not read.simulated:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=True
        ).stdout
        found = re.search(r"GPU-[0-9a-f-]+", listed)
        if found is None:
            print("no GPU", file=sys.stderr)
            return 1
        uuid = found[0]
    work = Path("/tmp/gpushare-loop")
    work.mkdir(parents=True, exist_ok=True)
    bench = Bench(work / "host", twin=read.simulated, program=[], gpu_uuid=uuid)
    scenes = [s for s in (TWIN_SCENES if read.simulated else GPU_SCENES) if not read.only or s.name in read.only]
    result: dict[str, Any] = {"alone": [], "scenes": []}

    def keep() -> None:
        (read.out / "loop.json").write_text(json.dumps(result, indent=1))

    stage: Stage | None = None
    failed = False
    try:
        bench.start_host()
        bench.until_active()
        os.environ.setdefault(LOG_LEVEL, "DEBUG")  # the agent's: each step of its loop in the log
        bench.start_agent(work / "agent")
        stage = Stage(bench, work)
        programs = sorted({role.program for scene in scenes for role in scene.roles})
        for number, program in enumerate(programs):
            with time_limit(150):
                result["alone"].append(
                    alone(stage, program, number, ALONE_SECONDS.get(program, read.alone_seconds))
                )
            keep()
        rates = {each["program"]: each["iterations_per_s"] for each in result["alone"]}
        for number, scene in enumerate(scenes, 1):
            try:
                with time_limit(read.seconds + 240):
                    result["scenes"].append(play(stage, scene, rates, read.seconds, 20 * number))
            except (OutOfTimeError, RuntimeError, TimeoutError) as error:
                result["scenes"].append({"scene": scene.name, "error": str(error)[:300]})
                failed = True
            keep()
            (read.out / "loop.md").write_text(table(result))
            print(table(result), flush=True)
    finally:
        if stage is not None:
            stage.close()
        bench.save_logs(read.out)
        bench.close()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
