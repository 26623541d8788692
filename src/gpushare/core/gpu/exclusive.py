"""Whether a GPU's compute mode keeps out processes that are not under its MPS server, and what it had before."""

from dataclasses import dataclass

from gpushare.core.gpu.devices import ComputeMode


@dataclass(frozen=True, slots=True)
class ModeChange:
    """What to do, in this order: remember, set, forget.

    Attributes:
        remember: the mode to write down as the GPU's own, before anything is set; None for nothing.
        set_to: the mode to set; None to leave it.
        forget: what was remembered is over once the mode is set.
    """

    remember: ComputeMode | None = None
    set_to: ComputeMode | None = None
    forget: bool = False


def mode_change(now: ComputeMode, own: ComputeMode | None, *, is_wanted: bool) -> ModeChange:
    """Return the next step to a GPU that is exclusive exactly while that is wanted.

    Args:
        own: what the GPU had before we made it exclusive, as written down; None when we did not.
        is_wanted: it is shared under MPS, and the option is on.

    What somebody else set stays: a GPU that was exclusive already, and one that may have no process at all.
    """
    if is_wanted:
        if now is ComputeMode.DEFAULT:
            return ModeChange(remember=now if own is None else None, set_to=ComputeMode.EXCLUSIVE_PROCESS)
        return ModeChange()
    if own is None:
        return ModeChange()
    if now is ComputeMode.EXCLUSIVE_PROCESS:
        return ModeChange(set_to=own, forget=True)
    return ModeChange(forget=True)  # somebody changed it meanwhile, or we were killed before we did
