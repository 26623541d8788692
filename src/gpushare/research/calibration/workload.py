"""What a workload is: a name and a builder that returns one iteration."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Step = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Stage:
    """Place where a workload is built.

    Attributes:
        device: "cuda", or "cpu" for a dry run of the whole collection on a machine without a GPU.
        tiny: shrink every size, for dry runs.
    """

    device: str = "cuda"
    tiny: bool = False

    def size(self, full: int, tiny: int = 8) -> int:
        """Return the size to use: `full` when measuring, `tiny` in a dry run."""
        return tiny if self.tiny else full


@dataclass(frozen=True, slots=True)
class Workload:
    """One program.

    Attributes:
        name: model, mode, precision and batch, such as "resnet50-train-bf16-b64".
        build: makes the program's state on the stage and returns one iteration; an iteration may return without
            waiting for the GPU.
        in_flight: iterations that may be queued on the GPU ahead of the one being waited for, as a training loop
            that never reads its loss does; 0 for programs that answer each request before the next.
        needs_cuda: has no CPU form.
    """

    name: str
    build: Callable[[Stage], Step]
    in_flight: int = 2
    needs_cuda: bool = False
