"""Resume an interrupted dataset: read what it holds, and check that it is of the same GPU."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from gpushare.research.calibration.plan import Cell
from gpushare.research.dataset import Dataset, DatasetError, parse

SIMULATED: Final = "simulated"
"""Driver that the header of a simulated dataset names."""


class ResumeError(RuntimeError):
    """The output exists and cannot be resumed; one sentence."""


@dataclass(frozen=True, slots=True)
class EarlierRuns:
    """Content of an output.

    Attributes:
        dataset: None where nothing was written yet.
        runs: how often each set was measured, its cells in order.
        whole_bytes: length of the complete lines; at most one incomplete line follows.
    """

    dataset: Dataset | None = None
    runs: Counter[tuple[Cell, ...]] = field(default_factory=Counter)
    whole_bytes: int = 0

    def check(self, about: Mapping[str, Any], mechanism: str) -> None:
        """Refuse to go on with another GPU's figures, or another mechanism's, or to mix made-up ones in.

        Raises:
            ResumeError: they are.
        """
        if self.dataset is None:
            return
        asked = (str(about["gpu_model"]), mechanism, about["driver"] == SIMULATED)
        begun = (self.dataset.gpu_model, self.dataset.mechanism.value, self.dataset.driver == SIMULATED)
        if asked != begun:
            raise ResumeError(
                f"the output holds runs of {_words(*begun)}, these would be of {_words(*asked)}: "
                "give another --output"
            )


def earlier_runs(path: Path) -> EarlierRuns:
    """Read the output of an earlier call; one that is not there or empty holds nothing.

    Raises:
        ResumeError: it is no dataset, or damaged before its last line. OSError: it cannot be read.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return EarlierRuns()
    whole = content[: content.rfind(b"\n") + 1]
    if not content.strip():
        return EarlierRuns()
    try:
        dataset = parse(whole.splitlines())
    except DatasetError as error:
        raise ResumeError(
            f"{path} is no dataset that can be gone on with ({error}): give another --output, or take it away"
        ) from None
    runs = Counter(
        key_of((tenant.workload, tenant.thread_percentage) for tenant in run.tenants) for run in dataset.runs
    )
    return EarlierRuns(dataset, runs, len(whole))


def cut_to_whole(path: Path, earlier: EarlierRuns) -> None:
    """Take away a last line that was cut off, which the next run would be written behind."""
    if path.exists() and path.stat().st_size > earlier.whole_bytes:
        with path.open("r+b") as file:
            file.truncate(earlier.whole_bytes)


def key_of(cells: Iterable[Cell]) -> tuple[Cell, ...]:
    """Return a set's cells in order."""
    return tuple(sorted(cells))


def _words(gpu_model: str, mechanism: str, is_simulated: bool) -> str:
    return f"{'a simulated ' * is_simulated}{gpu_model} under {mechanism}"
