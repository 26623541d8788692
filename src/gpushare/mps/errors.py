"""Errors of MPS, mapped once where they arise; the type says whether a retry helps."""


class MpsError(Exception):
    """The MPS control side did not do what was asked; `retryable` says whether asking again can help."""

    def __init__(self, message: str, *, retryable: bool) -> None:
        super().__init__(message)
        self.retryable = retryable


class DaemonDownError(MpsError):
    """No control daemon listens: it has not been started, or it died."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class ControlTimeoutError(MpsError):
    """The daemon did not answer in time; another connection may be keeping it busy (docs/facts.md 14)."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class NotSentError(MpsError):
    """The daemon was busy with another connection and took no command; nothing happened, so a retry is safe."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=True)


class CommandRefusedError(MpsError):
    """The daemon refused a command or cannot do it: insufficient privileges, no such server, bad argument."""

    def __init__(self, message: str) -> None:
        super().__init__(message, retryable=False)
