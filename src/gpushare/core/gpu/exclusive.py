"""The next change of a GPU's compute mode, which keeps processes outside MPS away and is set back later."""

from dataclasses import dataclass

from gpushare.core.gpu.devices import ComputeMode


@dataclass(frozen=True, slots=True)
class ModeChange:
    """Steps to take, in this order: remember, set, forget.

    Attributes:
        remember: the mode to record as the GPU's own before setting another; None for nothing.
        set_to: the mode to set; None to leave it.
        forget: whether to drop the recorded mode after the mode is set.
    """

    remember: ComputeMode | None = None
    set_to: ComputeMode | None = None
    forget: bool = False


def mode_change(now: ComputeMode, own: ComputeMode | None, *, is_wanted: bool) -> ModeChange:
    """Return the next steps that make a GPU exclusive while that is wanted, and only then.

    A mode that was set by somebody else stays: exclusive already, or prohibited.

    Args:
        now: the present mode.
        own: the recorded mode from before we made the GPU exclusive; None if we did not.
        is_wanted: the GPU is shared under MPS, and the option is on.
    """
    if is_wanted:
        if now is ComputeMode.DEFAULT:
            return ModeChange(remember=now if own is None else None, set_to=ComputeMode.EXCLUSIVE_PROCESS)
        return ModeChange()
    if own is None:
        return ModeChange()
    if now is ComputeMode.EXCLUSIVE_PROCESS:
        return ModeChange(set_to=own, forget=True)
    return ModeChange(forget=True)  # somebody changed it meanwhile, or we were killed before setting it
