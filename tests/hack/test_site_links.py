"""Outer links are found and asked; only a host's own word makes one dead."""

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import site_links
from site_links import State

PAGE = """
See [a page](https://site.org/one#part), <https://site.org/two>, and (https://site.org/a_(b)).
Again [it](https://site.org/one), a service http://prometheus.monitoring:9090, `https://site.org/in-code`,
https://127.0.0.1/ and https://registry.example.com/x.

```sh
curl https://site.org/in-a-block
```
"""


class Answers(BaseHTTPRequestHandler):
    """Answers with the status that the path names."""

    def do_GET(self) -> None:
        self.send_response(int(self.path[1:]))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()
    thread.join(30)


def test_links_are_found_without_anchors_code_and_addresses_that_nobody_has(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    (tmp_path / "other.md").write_text("[x](https://site.org/two)")
    found = site_links.outer_links([tmp_path / "page.md", tmp_path / "other.md"])
    assert found == {
        "https://site.org/a_(b)": ["page.md"],
        "https://site.org/one": ["page.md"],
        "https://site.org/two": ["page.md", "other.md"],
    }


@pytest.mark.parametrize(
    ("status", "state"), [(200, State.ALIVE), (404, State.DEAD), (410, State.DEAD), (403, State.UNKNOWN)]
)
def test_a_host_says_whether_it_has_the_page(site: str, status: int, state: State) -> None:
    assert site_links.ask(f"{site}/{status}") == (state, str(status))


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_error_leaves_the_state_of_a_link_unknown(site: str, status: int) -> None:
    assert site_links.ask(f"{site}/{status}") == (State.UNKNOWN, str(status))


def test_who_is_not_reached_is_unknown() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    state, answer = site_links.ask(f"http://127.0.0.1:{port}/")
    assert state is State.UNKNOWN
    assert answer.startswith("not reached: ")
    assert site_links.ask("http://no-such-host.invalid/")[0] is State.UNKNOWN


def test_one_dead_link_is_counted_and_named_with_its_page(tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    asked = []

    def ask(link: str) -> tuple[State, str]:
        asked.append(link)
        return (State.DEAD, "404") if link.endswith("two") else (State.UNKNOWN, "403")

    dead, table = site_links.outer([tmp_path / "page.md"], ask)
    assert (dead, sorted(set(asked)) == sorted(asked)) == (1, True), "each is asked once"
    assert table.startswith("3 links: 0 alive, 1 dead, 2 unknown.\n")
    assert "| <https://site.org/two> | dead | 404 | page.md |" in table


def test_no_link_of_the_record_is_dead() -> None:
    record = site_links.RECORD.read_text()
    assert "| dead |" not in record
    assert record.count("\n| <https://") >= 7
