"""python hack/bench latency|throughput [options]"""

import sys
from pathlib import Path

HACK = str(Path(__file__).resolve().parents[1])
sys.path[:] = [HACK, *(entry for entry in sys.path if not entry.endswith("hack/bench"))]

from bench import latency, throughput  # noqa: E402 - the path above finds them

COMMANDS = {"latency": latency.main, "throughput": throughput.main}

if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    sys.exit(__doc__)
COMMANDS[sys.argv[1]](sys.argv[2:])
