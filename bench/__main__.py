"""python -m bench gate|latency|learning|loop|operator|throughput [options]"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "hack"))  # devcluster: the tools of a control plane

from bench import gate, latency, learning, loop, operator, throughput

COMMANDS = {
    "gate": gate.main,
    "latency": latency.main,
    "learning": learning.main,
    "loop": loop.main,
    "operator": operator.main,
    "throughput": throughput.main,
}

if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
    sys.exit(__doc__)
COMMANDS[sys.argv[1]](sys.argv[2:])
