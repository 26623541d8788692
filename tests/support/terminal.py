"""A process on a terminal of its own: what it shows, and keys pressed."""

import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120.0
OUR_PROGRAM = "import sys; from gpushare.cli import main; sys.argv[0] = 'gpushare'; main()"
# Each argument is a whole command, and all end well: most of a command's time is the import of its modules.
SEVERAL = """
import sys
from gpushare.cli import main
for words in sys.argv[1:]:
    sys.argv = ["gpushare", *words.split()]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (words, end.code)
"""


class Terminal:
    """A process whose input, output and errors are one terminal.

    Attributes:
        shown: what it has written since the last key.
    """

    def __init__(self, command: Sequence[str | Path], environment: Mapping[str, str]) -> None:
        self.master, slave = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment, start_new_session=True
        )
        os.close(slave)
        self.shown = ""

    @classmethod
    def of_gpushare(cls, *words: str, kubeconfig: Path, program: str = OUR_PROGRAM, **environment: str) -> Self:
        """Run our command line, on a terminal of 100 columns unless told otherwise."""
        whole = {
            **{name: value for name, value in os.environ.items() if name not in {"NO_COLOR", "FORCE_COLOR"}},
            "PYTHONPATH": str(ROOT / "src"),
            "KUBECONFIG": str(kubeconfig),
            "TERM": "xterm",
            "COLUMNS": "100",
            "LINES": "12",
            **environment,
        }
        return cls([sys.executable, "-c", program, *words], whole)

    def wait_for(self, text: str) -> None:
        """Read until a text has been shown since the last key."""
        until = time.monotonic() + PATIENCE_SECONDS
        while text not in self.shown:
            assert time.monotonic() < until, f"{text!r} is not in {self.shown!r}"
            if not self._read():
                assert text in self.shown, f"it ended before {text!r}: {self.shown!r}"

    def wait_for_the_end(self) -> int:
        """Read until the process has ended; its exit status."""
        until = time.monotonic() + PATIENCE_SECONDS
        while self._read():
            assert time.monotonic() < until, f"it has not ended: {self.shown!r}"
        return self.process.wait(PATIENCE_SECONDS)

    def _read(self) -> bool:
        """Take what is written within half a second; whether the other side is still there."""
        if not select.select([self.master], [], [], 0.5)[0]:
            return True
        try:
            read = os.read(self.master, 65536)
        except OSError:  # the other side has closed
            return False
        self.shown += read.decode(errors="replace")
        return bool(read)

    def press(self, keys: str) -> None:
        self.shown = ""
        os.write(self.master, keys.encode())

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)
