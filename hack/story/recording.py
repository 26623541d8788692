"""`python -m story.recording CAST COMMAND...`: run a command on a terminal of its own, and record what it shows.

The recording is asciinema's format, version 2: a header, then a line for each piece of output with its time.
"""

import fcntl
import json
import os
import pty
import struct
import sys
import termios
import time
from codecs import getincrementaldecoder
from collections.abc import Iterator
from pathlib import Path
from typing import Final

COLUMNS: Final = 100
LINES: Final = 36
TITLE: Final = "gpushare: make demo"
# A player cuts longer ones, and shows that time passed by the story's own clock.
LONGEST_PAUSE_SECONDS: Final = 2.0


def header(now: float) -> str:
    """Return the first line of a recording.

    Args:
        now: Unix time.
    """
    written = {
        "version": 2,
        "width": COLUMNS,
        "height": LINES,
        "timestamp": int(now),
        "title": TITLE,
        "idle_time_limit": LONGEST_PAUSE_SECONDS,
        "env": {"TERM": "xterm-256color"},
    }
    return json.dumps(written) + "\n"


def entry(seconds: float, text: str) -> str:
    """Return the line of one piece of output."""
    return json.dumps([round(seconds, 3), "o", text], ensure_ascii=False) + "\n"


def record(recording: Path, command: list[str]) -> int:
    """Run a command and write its recording; show it here as well; return its exit status."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    lines = [header(time.time())]
    begun = time.monotonic()
    for text in _output_of(terminal):
        lines.append(entry(time.monotonic() - begun, text))
        sys.stdout.write(text)
        sys.stdout.flush()
    os.close(terminal)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if status == 0:  # a story that ended early is not shown to anybody
        recording.write_text("".join(lines))
    return status


def _output_of(terminal: int) -> Iterator[str]:
    """Yield what the other end writes, until it is gone; characters come whole."""
    decoder = getincrementaldecoder("utf-8")("replace")
    while True:
        try:
            data = os.read(terminal, 65536)
        except OSError:  # Linux: the last process has closed its end
            return
        if not data:
            return
        if text := decoder.decode(data):
            yield text


if __name__ == "__main__":
    sys.exit(record(Path(sys.argv[1]), sys.argv[2:]))
