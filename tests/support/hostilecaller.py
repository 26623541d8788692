"""What a hostile root tenant's pod does over the network: `python -c PROGRAM [COMMAND ...]`, in gpushare's image.

It is no part of the image: a pod's command carries it as text. It starts the command, a tenant's own work, and
does what tests/support/hostiletenant.py asks by HTTP: a POST names an attack, and the answer is what came of it.
"""

import contextlib
import http.client
import json
import os
import resource
import select
import socket
import ssl
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PORT = 8080
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
SECONDS = 30.0  # for an answer, longer than any server's own time limits
HEAD = b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 4000000\r\n\r\n"
TINY = b"POST /mutate HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"
HELD: list[socket.socket] = []


def call(
    method: str,
    path: str,
    body: object = None,
    content_type: str = "application/json",
    token: str | None = None,
    headers: dict[str, str] | None = None,
) -> dict[str, object]:
    """Ask the API server, as the pod's own account or with a stolen token."""
    address = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT_HTTPS"])
    trust = ssl.create_default_context(cafile=str(ACCOUNT / "ca.crt"))
    token = token or (ACCOUNT / "token").read_text()
    sent = {"Authorization": f"Bearer {token}", "Content-Type": content_type, **(headers or {})}
    began = time.monotonic()
    connection = http.client.HTTPSConnection(*address, context=trust, timeout=SECONDS)
    with contextlib.closing(connection):
        connection.request(method, path, None if body is None else json.dumps(body), sent)
        answer = connection.getresponse()
        text = answer.read().decode(errors="replace")
    try:
        found = json.loads(text)
    except ValueError:
        found = {"message": text}
    warnings = answer.headers.get_all("Warning") or []
    return {"code": answer.status, "body": found, "warnings": warnings, "seconds": time.monotonic() - began}


def untrusting() -> ssl.SSLContext:
    """TLS with whoever answers."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


def client_hello() -> bytes:
    """The first message of a handshake."""
    outgoing = ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        untrusting().wrap_bio(ssl.MemoryBIO(), outgoing).do_handshake()
    return outgoing.read()


def hold(addresses: list[list[object]], count: int, says: str) -> int:
    """Open so many connections to each address and keep them; `says`: nothing, hello, or head (of a request)."""
    hello, before = client_hello(), len(HELD)
    for host, port in addresses:
        for _ in range(count):
            one = socket.create_connection((str(host), int(str(port))), SECONDS)
            with contextlib.suppress(OSError):  # closed already: that is what is asked for later
                if says == "hello":
                    one.sendall(hello)
                elif says == "head":
                    one = untrusting().wrap_socket(one)
                    one.sendall(HEAD)
            HELD.append(one)
    return len(HELD) - before


def count() -> dict[str, int]:
    """Of what is held, how many the other sides have closed, and how many are open."""
    poll = select.poll()
    for one in HELD:
        if one.fileno() >= 0:
            poll.register(one, select.POLLRDHUP)
    still_open = sum(one.fileno() >= 0 for one in HELD) - len(poll.poll(0))
    return {"closed": len(HELD) - still_open, "open": still_open}


def release() -> dict[str, int]:
    """Close what is held; how many the other sides had closed, and how many were still open."""
    found = count()
    while HELD:
        HELD.pop().close()
    return found


def post(host: str, port: int, path: str, bodies: list[str]) -> list[int]:
    """Send these bodies over HTTPS, one after the other; the status of each answer, 0 for none."""
    statuses = []
    for body in bodies:
        connection = http.client.HTTPSConnection(host, port, context=untrusting(), timeout=SECONDS)
        with contextlib.closing(connection):
            try:
                connection.request("POST", path, body.encode("latin-1"), {"Content-Type": "application/json"})
                statuses.append(connection.getresponse().status)
            except (OSError, http.client.HTTPException):
                statuses.append(0)
    return statuses


class Loop:
    """Tiny reviews on connections that are kept, each sent again as soon as it was answered."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.answers = [0]
        self.threads: list[threading.Thread] = []

    def begin(self, addresses: list[list[object]], count: int) -> None:
        for host, port in addresses:
            self.threads += [
                threading.Thread(target=self._keep_on, args=(str(host), int(str(port)))) for _ in range(count)
            ]
        self.answers = [0] * len(self.threads)
        for each in self.threads:
            each.start()

    def _keep_on(self, host: str, port: int) -> None:
        own = self.threads.index(threading.current_thread())
        while not self.ended.is_set():
            with (
                contextlib.suppress(OSError),
                socket.create_connection((host, port), SECONDS) as plain,
                untrusting().wrap_socket(plain) as one,
            ):
                while not self.ended.is_set():
                    one.sendall(TINY)
                    if not one.recv(4096):
                        break
                    self.answers[own] += 1


LOOPS: list[Loop] = []


def loop(addresses: list[list[object]], count: int) -> int:
    """Post tiny reviews in a loop on so many connections to each address, until `end_loop`."""
    LOOPS.append(Loop())
    LOOPS[-1].begin(addresses, count)
    return len(LOOPS[-1].threads)


def end_loop() -> int:
    """End the loops; how many answers they had."""
    answers = 0
    while LOOPS:
        ended = LOOPS.pop()
        ended.ended.set()
        for each in ended.threads:
            each.join()
        answers += sum(ended.answers)
    return answers


ATTACKS = (call, hold, count, release, post, loop, end_loop)


class AttackHandler(BaseHTTPRequestHandler):
    """Does one attack for each POST."""

    def do_POST(self) -> None:
        asked = json.loads(self._body())
        attack = {each.__name__: each for each in ATTACKS}[asked.pop("attack")]
        answer = json.dumps(attack(**asked)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _body(self) -> bytes:
        """Read what was sent; kubectl sends it in chunks."""
        if "Content-Length" in self.headers:
            return self.rfile.read(int(self.headers["Content-Length"]))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        return body


def main() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    if sys.argv[1:]:
        subprocess.Popen(sys.argv[1:])
    ThreadingHTTPServer(("", PORT), AttackHandler).serve_forever()


if __name__ == "__main__":
    main()
