"""Errors that the user can fix, each with the exit status of its kind."""

from enum import IntEnum
from typing import ClassVar


class ExitStatus(IntEnum):
    """Exit statuses (docs/cli.md)."""

    DONE = 0
    NO = 1
    """The question was answered, and the answer is no: a pod fits nowhere."""
    USAGE = 2
    NOT_FOUND = 3
    """No such pod or GpuShare, or the cluster has no gpushare, or no GPU that it manages."""
    FORBIDDEN = 4
    UNREACHABLE = 5
    """No cluster is configured, or its API server does not answer."""
    OTHER_VERSION = 6
    """The cluster runs a gpushare that this program does not understand."""
    DEFECT = 70


class CommandError(Exception):
    """One sentence that says what is wrong and what to do; no traceback."""

    status: ClassVar[ExitStatus] = ExitStatus.DEFECT


class UsageError(CommandError):
    """Bad input: the sentence names the file, line or option."""

    status = ExitStatus.USAGE


class AbsentError(CommandError):
    """The requested object does not exist."""

    status = ExitStatus.NOT_FOUND


class ForbiddenError(CommandError):
    """The API does not allow it."""

    status = ExitStatus.FORBIDDEN


class UnreachableError(CommandError):
    """No cluster can be reached."""

    status = ExitStatus.UNREACHABLE


class OtherVersionError(CommandError):
    """The cluster runs a version of gpushare that this program does not understand."""

    status = ExitStatus.OTHER_VERSION
