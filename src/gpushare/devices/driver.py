"""Map NVML's errors to `DevicesError`, each with a sentence."""

import contextlib
import re
from collections.abc import Iterator

import pynvml

from gpushare.core.gpu import DevicesError

_LIBRARY = "libnvidia-ml.so.1"


def explain(error: pynvml.NVMLError) -> str:
    """Return NVML's text for an error, and what it means if the driver is absent or too old."""
    if isinstance(error, pynvml.NVMLError_LibraryNotFound):
        return f"the driver's library {_LIBRARY} is not here"
    if isinstance(error, pynvml.NVMLError_FunctionNotFound):
        # pynvml keeps the loader's error, which names the function, as the context of its own error.
        missing = re.search(r"undefined symbol: (\w+)", str(error.__context__))
        return f"this driver is too old: its NVML has no {missing[1] if missing else 'such function'}"
    return str(error)


@contextlib.contextmanager
def driver_errors(trouble: str) -> Iterator[None]:
    """Raise NVML's errors as DevicesError; the message begins with what cannot be done.

    A function that the driver lacks is a permanent error; any other may be temporary.
    """
    try:
        yield
    except pynvml.NVMLError as error:
        is_old = isinstance(error, pynvml.NVMLError_FunctionNotFound)
        raise DevicesError(f"{trouble}: {explain(error)}", retryable=not is_old) from error
