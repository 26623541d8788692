"""What ending one MPS client does to the others and to the next: `terminated.py OUT SECONDS [holding]`.

An MPS daemon of its own, PyTorch imported once and forked. A batch of first clients starts at once and waits; each
in turn works for a moment, beside a neighbour that trains or alone, and is ended in one of the ways of `Way`; then
a newcomer makes a context and takes a few steps. A row per round: whether the server told of a fault, and who was
lost. It wants the GPU for itself, changes no setting of it, and ends its daemon.
"""

import contextlib
import ctypes
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpushare.mps import ControlProgram, SyncMpsControl, commands
from gpushare.mps.ending import Endings, EndingStep
from gpushare.mps.errors import MpsError
from gpushare.mps.identity import start_ticks_of
from gpushare.mps.terminating import Terminator

NEIGHBOUR, NEWCOMER = "cnn_train_fp32", "tiny"
WORK_SECONDS, DRAIN_SECONDS = 0.3, 0.6
LONG_CYCLES = 12 * 10**9  # of a kernel that spins: six to eight seconds
BIG = 40_960  # rows of the fp32 product of seconds
SEIZE, INTERRUPT, ALL_THREADS = 0x4206, 0x4207, 0x40000000  # PTRACE_SEIZE, PTRACE_INTERRUPT, __WALL


class Way(StrEnum):
    """How the first client ends."""

    KILLED = "kill -9"
    TERMINATED = "terminate_client; it exits at the error"
    TERMINATED_STAYS = "terminate_client; it stays for 1 s, then kill -9"
    TERMINATED_KILLED = "terminate_client, kill -9 at once"
    DRAINED_KILLED = "stopped for 0.6 s, kill -9"
    DRAINED_TERMINATED = "stopped for 0.6 s, continued and terminate_client"
    STOPPED_TERMINATED_CONTINUED = "stopped for 0.6 s, terminate_client, continued"
    STOPPED_TERMINATED = "stopped for 0.6 s, terminate_client, kill -9"
    HELD_TERMINATED = "launching threads held for 0.6 s, terminate_client, kill -9"
    HELD_KILLED = "launching threads held for 0.6 s, kill -9"
    STOPPED_HELD_TERMINATED = "stopped for 0.6 s, launching threads held, continued, terminate_client, kill -9"
    GATE = "as the gate does: stopped for 1 s, launching threads held, terminate_client, kill -9"
    GATE_CAUGHT = "as the gate does, stopped within libc"


DIRECT = [Way.TERMINATED, Way.TERMINATED_STAYS, Way.TERMINATED_KILLED]
CAREFUL = [Way.DRAINED_KILLED, Way.KILLED]
STOPS = {
    Way.DRAINED_KILLED,
    Way.DRAINED_TERMINATED,
    Way.STOPPED_TERMINATED,
    Way.STOPPED_TERMINATED_CONTINUED,
    Way.STOPPED_HELD_TERMINATED,
}
HOLDS = {Way.HELD_TERMINATED, Way.HELD_KILLED}
PLAN: list[tuple[str, bool, list[Way]]] = [
    ("fp16_product", True, [Way.STOPPED_TERMINATED_CONTINUED] * 4),
    ("big_product", True, [Way.HELD_TERMINATED]),
    ("fp16_product", False, [Way.STOPPED_TERMINATED_CONTINUED] * 4),
    ("big_product", True, [Way.STOPPED_TERMINATED_CONTINUED]),
    ("long", True, [Way.STOPPED_TERMINATED_CONTINUED, Way.HELD_TERMINATED] * 2),
    ("big_product", True, [Way.TERMINATED]),
    ("fp16_product", True, [Way.HELD_TERMINATED] * 3),
    ("fp16_product", True, CAREFUL * 2),
    ("big_product", True, [Way.DRAINED_KILLED]),
    ("fp16_product", True, DIRECT),
    ("fp16_product", False, CAREFUL * 2),
    ("fp16_product", False, DIRECT),
    ("transformer_train_bf16", True, [*CAREFUL, Way.STOPPED_TERMINATED_CONTINUED, Way.HELD_TERMINATED]),
    ("long", True, [Way.TERMINATED_STAYS, Way.DRAINED_TERMINATED, Way.KILLED]),
    ("transformer_train_bf16", True, DIRECT),
]
BOTH = [Way.GATE_CAUGHT, Way.GATE]
HOLDING: list[tuple[str, bool, list[Way]]] = [
    ("big_product", True, BOTH),
    ("fp16_product", True, BOTH * 2),
    ("long", True, [*BOTH, Way.GATE_CAUGHT]),
    ("transformer_train_bf16", True, BOTH * 2),
    ("fp16_product", False, BOTH * 2),
]
PLANS = {"ways": PLAN, "holding": HOLDING}
ANSWER_SECONDS = 1.0  # a client that has not answered by then is killed


@dataclass
class Client:
    """A forked client: `said` reads its "r" (ready), "w" (works), "." (done); a byte to `tell` lets it work."""

    pid: int
    letters: int
    tell: int
    ended: bool = False
    traced: tuple[int, ...] = ()  # its threads whose tracer we are: they stay until we have waited for them

    def hears(self, seconds: float) -> str:
        """Return its next letter; empty when none came in time or it ended."""
        os.set_blocking(self.letters, False)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            try:
                return os.read(self.letters, 1).decode()
            except BlockingIOError:
                time.sleep(0.005)
        return ""

    def lives(self) -> bool:
        """Return whether it has not ended."""
        for thread in self.traced:
            if thread != self.pid:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(thread, os.WNOHANG | ALL_THREADS)
        if not self.ended:
            try:
                self.ended = os.waitpid(self.pid, os.WNOHANG)[0] != 0
            except ChildProcessError:  # the terminator's thread, its tracer, was first
                self.ended = True
        return not self.ended

    def end(self) -> None:
        """Kill it and wait until it is gone."""
        if self.lives():
            os.kill(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + 10
        while self.lives() and time.monotonic() < deadline:
            time.sleep(0.005)

    def close(self) -> None:
        """End it and close its pipes."""
        self.end()
        for end in (self.letters, self.tell):
            with contextlib.suppress(OSError):
                os.close(end)


def _start(program: str, environment: dict[str, str], *, steps: int = 0, stays: bool = False) -> Client:
    """Fork a client that is ready after its first step, then takes `steps` more (0: until it is ended)."""
    letters, speak = os.pipe()
    listen, tell = os.pipe()
    pid = os.fork()
    if pid:
        os.close(speak)
        os.close(listen)
        return Client(pid, letters, tell)
    try:
        os.environ.update(environment)
        import torch
        from programs import PROGRAMS

        if program == "long":
            step = lambda: torch.cuda._sleep(1000)  # noqa: E731
        elif program == "big_product":
            torch.backends.cuda.matmul.allow_tf32 = False
            matrix = torch.ones(256, 256, device="cuda")
            step = lambda: matrix @ matrix  # noqa: E731
        else:
            step = PROGRAMS[program]()
        step()
        torch.cuda.synchronize()
        os.write(speak, b"r")
        os.read(listen, 1)
        os.write(speak, b"w")
        if program == "long":
            step = lambda: torch.cuda._sleep(LONG_CYCLES)  # noqa: E731
        elif program == "big_product":
            matrix = torch.ones(BIG, BIG, device="cuda")
            product = torch.empty_like(matrix)
            step = lambda: torch.mm(matrix, matrix, out=product)  # noqa: E731
        for number in itertools.count(1):
            step()
            if number % 4 == 0 or program in ("long", "big_product"):
                torch.cuda.synchronize()
            if number == steps:
                torch.cuda.synchronize()
                os.write(speak, b".")
                os._exit(0)
    except BaseException as error:
        os.write(2, f"{program}: {str(error)[:110]}\n".encode())
        if stays:
            time.sleep(1)
    os._exit(3)


def hold(client: Client) -> dict[str, object]:
    """Stop every thread of a process but CUDA's own, whose names begin with "cuda"; they stay held until it ends.

    Returns the names of both, and what ptrace refused. By ptrace(2); the caller is the tracer as long as it lives.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
    libc.ptrace.restype = ctypes.c_long
    stopped, left, refused = [], [], []
    for thread in sorted(int(task.name) for task in Path(f"/proc/{client.pid}/task").iterdir()):
        name = Path(f"/proc/{client.pid}/task/{thread}/comm").read_text().strip()
        if name.startswith("cuda"):
            left.append(name)
            continue
        for request in (SEIZE, INTERRUPT):
            if libc.ptrace(request, thread, None, None):
                refused.append(f"{name}: {os.strerror(ctypes.get_errno())}")
                break
        else:
            os.waitpid(thread, ALL_THREADS | os.WUNTRACED)
            stopped.append(f"{name}: {_where(client.pid, thread)}")
            client.traced += (thread,)
    return {"held": stopped, "left": left, "refused": refused}


def _where(pid: int, thread: int) -> str:
    """Return what a stopped thread was doing: its system call, and the file of its next instruction."""
    try:
        words = Path(f"/proc/{pid}/task/{thread}/syscall").read_text().split()
        place = int(words[-1], 16)
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            low, _, high = line.split()[0].partition("-")
            if int(low, 16) <= place < int(high, 16):
                return f"call {words[0]} in {line.split()[-1].rpartition('/')[2]}"
    except (OSError, ValueError, IndexError) as error:
        return str(error)
    return f"call {words[0]}"


class Rounds:
    """The daemon, the neighbour, and one round after the other."""

    def __init__(self, place: Path) -> None:
        self.control = SyncMpsControl(ControlProgram(place / "pipe", place / "log"))
        self.environment = {"CUDA_MPS_PIPE_DIRECTORY": str(place / "pipe")}
        self.neighbour: Client | None = None
        (place / "pipe").mkdir()
        (place / "log").mkdir()
        self.control.start()
        self.control.run(commands.start_server(0))

    def faults(self) -> int:
        """Return how many faults the server's log tells of."""
        text = (self.control.program.log / "server.log").read_text(errors="replace")
        return text.count("Server is handling a fatal GPU error")

    def terminate(self, pid: int) -> str:
        """Have the server end a client; return its answer."""
        try:
            (server,) = self.control.servers()
            self.control.run(commands.terminate_client(server, pid))
        except (MpsError, ValueError) as error:
            return str(error)[:120]
        return "ok"

    def beside(self) -> Client:
        """Return the neighbour at work, a new one where the last was lost."""
        if self.neighbour is None or not self.neighbour.lives():
            self.neighbour = _start(NEIGHBOUR, self.environment)
            self.neighbour.hears(40)
            os.write(self.neighbour.tell, b"!")
            self.neighbour.hears(5)
        return self.neighbour

    def alone(self) -> None:
        """End the neighbour between rounds: it is idle by then."""
        if self.neighbour is not None:
            if self.neighbour.lives():
                os.kill(self.neighbour.pid, signal.SIGSTOP)
                time.sleep(DRAIN_SECONDS)
            self.neighbour.close()
            self.neighbour = None

    def batch(self, program: str, ways: list[Way], *, beside: bool) -> list[dict[str, object]]:
        """Run one round for each of the ways; stop at the first fault, whose clients are all lost."""
        clients = [_start(program, self.environment, stays=way is Way.TERMINATED_STAYS) for way in ways]

        ready = [client.hears(60) for client in clients]
        rows: list[dict[str, object]] = []
        try:
            neighbour = self.beside() if beside else self.alone()
            for client, way, began in zip(clients, ways, ready, strict=True):
                row = self._one(client, program, way, began, neighbour)
                rows.append({"program": program, "way": way.value, "neighbour": beside, **row})
                if row["faults"]:
                    break
        finally:
            for client in clients:
                client.close()
        return rows

    def _one(
        self, client: Client, program: str, way: Way, began: str, neighbour: Client | None
    ) -> dict[str, object]:
        before, others = self.faults(), time.monotonic()
        row: dict[str, object] = {"ready": began}
        if not client.lives():
            return {**row, "faults": 1, "error": "it was lost before its turn"}
        os.write(client.tell, b"!")
        row["works"] = client.hears(5)
        time.sleep(1 if program == "big_product" else WORK_SECONDS)
        if way in HOLDS:
            row.update(hold(client))
            time.sleep(DRAIN_SECONDS)
        if way in STOPS:
            os.kill(client.pid, signal.SIGSTOP)
            time.sleep(DRAIN_SECONDS)
        if way is Way.STOPPED_HELD_TERMINATED:
            row.update(self._hold_and_terminate(client))
        if way in BOTH:
            if way is Way.GATE_CAUGHT:
                row["stops"] = catch(client.pid)
            row.update(self._end_as_the_gate(client))
        if way is Way.DRAINED_TERMINATED:
            os.kill(client.pid, signal.SIGCONT)
        if way not in (Way.KILLED, Way.DRAINED_KILLED, Way.HELD_KILLED, Way.STOPPED_HELD_TERMINATED, *BOTH):
            asked = time.monotonic()
            row["answer"] = self.terminate(client.pid)
            row["asked_s"] = round(time.monotonic() - asked, 3)
        if way is Way.STOPPED_TERMINATED_CONTINUED:
            os.kill(client.pid, signal.SIGCONT)
        if way is Way.TERMINATED_STAYS:
            time.sleep(0.6)
            row["faults_while_it_stays"] = self.faults() - before
            time.sleep(0.3)
        elif way in (Way.TERMINATED, Way.DRAINED_TERMINATED, Way.STOPPED_TERMINATED_CONTINUED):
            deadline = time.monotonic() + 5
            while client.lives() and time.monotonic() < deadline:
                time.sleep(0.005)
        client.end()
        time.sleep(0.3)
        row["faults_at_its_end"] = self.faults() - before
        newcomer = _start(NEWCOMER, self.environment, steps=4)
        os.write(newcomer.tell, b"!")
        row["newcomer"] = ""
        while letter := newcomer.hears(15):
            row["newcomer"] = f"{row['newcomer']}{letter}"
        row["faults"] = self.faults() - before
        if neighbour:
            row["neighbour_lives"] = neighbour.lives()
        row["seconds"] = round(time.monotonic() - others, 2)
        newcomer.close()
        return row

    def _hold_and_terminate(self, client: Client) -> dict[str, object]:
        """Hold and continue a stopped client, ask for its end, and kill it when it has ended or after a second."""
        began = time.monotonic()
        row = hold(client)
        os.kill(client.pid, signal.SIGCONT)
        row["held_s"] = round(time.monotonic() - began, 4)
        answer: list[str] = []
        asks = threading.Thread(target=lambda: answer.append(self.terminate(client.pid)))
        asked = time.monotonic()
        asks.start()
        asks.join(ANSWER_SECONDS)
        row["answered_in_time"] = bool(answer)
        if answer:
            row["asked_s"] = round(time.monotonic() - asked, 4)
        client.end()
        asks.join()
        row["answer"], row["free_s"] = answer[0], round(time.monotonic() - asked, 3)
        return row

    def _end_as_the_gate(self, client: Client) -> dict[str, object]:
        """Look ten times a second, as the gate does, until the client is gone."""
        began, asked = time.monotonic(), []

        def ask(pid: int, _seconds: float) -> None:
            at = time.monotonic()
            answer = self.terminate(pid)
            asked.append((round(time.monotonic() - at, 4), answer))

        endings = Endings(terminate=Terminator(ask))
        ticks = start_ticks_of(client.pid)
        steps: list[str] = []
        where = {}
        while time.monotonic() < began + 20:
            step = endings.end(client.pid, ticks)
            if not steps or steps[-1] != step.value:
                steps.append(step.value)
            if step is EndingStep.STOPPED:
                time.sleep(0.02)
                where = {"where": [_where(client.pid, client.pid)]}
            if step is EndingStep.GONE:
                break
            time.sleep(0.1)
        client.end()
        answer = asked[0][1] if asked else "not asked"
        late = bool(asked) and asked[0][0] > ANSWER_SECONDS
        return {
            **where,
            "steps": steps,
            "answer": answer,
            "asked_s": asked[0][0] if asked else None,
            "answered_in_time": bool(asked) and not late and answer == "ok",
            "gone_s": round(time.monotonic() - began, 3),
        }


def catch(pid: int) -> int:
    """Stop a process while its first thread executes in libc, where a held one left the server without answer.

    Returns how many stops it took; it stays stopped as it is after 400.
    """
    stops = 0
    while stops < 400:
        stops += 1
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.004)
        if _where(pid, pid).startswith("call -1 in libc.so"):
            break
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001 + 0.003 * random.random())
    return stops


def main() -> None:
    """Run batches until the time is over, and write the rows and their sums."""
    out, seconds, plan = Path(sys.argv[1]), float(sys.argv[2]), PLANS[(sys.argv[3:] or ["ways"])[0]]
    out.mkdir(parents=True, exist_ok=True)
    import torch  # noqa: F401  (imported once, before the forks)

    deadline, dice = time.monotonic() + seconds, random.Random(1)
    sums: dict[tuple[str, str, bool], list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="gpushare-terminated-", ignore_cleanup_errors=True) as place:
        rounds = Rounds(Path(place))
        try:
            with (out / "terminated.jsonl").open("w") as file:
                for program, beside, ways in itertools.cycle(plan):
                    if time.monotonic() > deadline:
                        break
                    rows = rounds.batch(program, dice.sample(ways, len(ways)), beside=beside)
                    for row in rows:
                        file.write(json.dumps(row) + "\n")
                        kept = sums.setdefault((program, str(row["way"]), beside), [0, 0, 0, 0])
                        kept[0] += 1
                        kept[1] += bool(row["faults"])
                        kept[2] += row.get("newcomer") != "rw."
                        kept[3] += row.get("neighbour_lives") is False
                    file.flush()
        finally:
            rounds.alone()
            log = rounds.control.program.log / "server.log"
            (out / "terminated-server.log").write_text(log.read_text(errors="replace")[-4_000_000:])
            rounds.control.stop()
        for (program, way, beside), (number, faults, lost, ended) in sorted(sums.items()):
            where = "beside" if beside else "alone"
            seen = f"rounds {number:3} faults {faults} newcomer lost {lost} neighbour lost {ended}"
            print(f"{program:24} {where:7} {way:52} {seen}")


if __name__ == "__main__":
    main()
