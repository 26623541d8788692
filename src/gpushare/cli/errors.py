"""Errors that the person at the terminal can mend."""


class UsageError(Exception):
    """Bad input, said in one sentence that names the file, line or option; exit code 2, no traceback."""
