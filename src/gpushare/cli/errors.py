"""Errors that the user can fix."""


class UsageError(Exception):
    """Bad input: one sentence that names the file, line or option; exit code 2, no traceback."""
