"""The root command: loads only the command group that is used and prints user errors as one sentence."""

import errno
import importlib
import io
import os
import sys
from pathlib import Path
from typing import Any, Final, NoReturn, TextIO

import typer
from typer.exceptions import TyperException

from gpushare import __version__
from gpushare.cli.errors import CommandError, ExitStatus, UsageError

# Name -> (module with a `typer.Typer` named app, one line of help). Only the group that is used is imported, so
# that a help text does not wait for numpy or the Kubernetes client. A group that is one command has a callback
# and nothing else.
GROUPS: Final[dict[str, tuple[str, str]]] = {
    "top": ("gpushare.cli.top", "Who shares which GPU, at what cap, what was promised, and how each one fares."),
    "pods": ("gpushare.cli.pods", "The pods that share GPUs, what they were given, and where they are."),
    "gpus": ("gpushare.cli.gpus", "The GPUs, what is free on each, and how busy it is."),
    "explain": ("gpushare.cli.explain", "Why a pod is where it is, or waits; what was promised, seen and done."),
    "gain": ("gpushare.cli.gain", "What sharing gains now: progress against the GPUs in use."),
    "report": ("gpushare.cli.report.command", "What the GPUs did over a span of time, as one HTML page."),
    "sim": ("gpushare.cli.sim", "Simulate placement on a cluster, or jobs that share GPUs."),
    "snapshot": ("gpushare.cli.snapshot", "Read a live cluster into files that sim and plan take."),
    "plan": ("gpushare.cli.plan", "Where pods would go, and why not elsewhere."),
    "mps": ("gpushare.cli.mps", "Look at and act on the MPS daemons and gates of this node."),
    "model": ("gpushare.cli.model", "The interference model and attribution on measured runs."),
    "calibrate": ("gpushare.cli.calibrate", "Measure programs alone and together on this machine's GPU."),
    "profile": ("gpushare.cli.profile", "How much of a GPU a workload or a program uses, pipe by pipe."),
    "completion": ("gpushare.cli.completion", "Completion for bash, zsh and fish."),
    "pairs": ("gpushare.cli.pairs", "Partner choice on a table of measured pairs of jobs."),
}

# Modules of the extra `fit`: fitting, evaluation and plots need them, nothing on a cluster does.
FIT_MODULES: Final = frozenset({"matplotlib", "networkx", "scipy", "sklearn"})


DEBUG: Final = "GPUSHARE_DEBUG"
"""If set, defects are shown with their traceback."""
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_INTERRUPTED: Final = 130  # the shell's status of a program that ctrl-c ended


def build(used: str | None) -> typer.Typer:
    """Build the application with the group `used` loaded, and the others with name and help text only."""
    app = typer.Typer(
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
        help="Share GPUs in space under CUDA MPS: simulate, plan, profile, and look at a cluster.",
    )

    @app.callback()
    def root() -> None:
        pass

    @app.command()
    def version() -> None:
        """Print gpushare's version."""
        typer.echo(__version__)

    for name, (module, text) in GROUPS.items():
        group = importlib.import_module(module).app if name == used else typer.Typer(callback=lambda: None)
        own = group.registered_callback
        if own is not None and own.callback is not None and not group.registered_commands:
            app.command(name, help=text)(own.callback)
        else:
            app.add_typer(group, name=name, help=text)
    return app


def main() -> None:
    """Run the command line; an error that the user can fix becomes one sentence and an exit status by its kind."""
    _replace_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() not in ("utf-8", "utf8"):
            stream.reconfigure(errors="replace")  # characters that the locale lacks become question marks
    used = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    output, file = sys.stdout, _file_of(sys.stdout)
    try:
        sys.exit(_run(build(used)))
    except SystemExit:
        # When the reader has gone, typer puts another stream there and rich another file; both end with our "no".
        if sys.stdout is not output or _file_of(output) != file:
            sys.stdout = output
            _drop_output()
            sys.exit(ExitStatus.DONE)
        raise
    except CommandError as error:
        _stop(str(error), error.status)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in FIT_MODULES:
            raise
        _stop(f'this command needs {error.name}: pip install ".[fit]" in gpushare\'s repository', ExitStatus.USAGE)
    except KeyboardInterrupt:
        sys.exit(_INTERRUPTED)
    except BrokenPipeError:  # the reader, such as head, closed the pipe
        _drop_output()
        sys.exit(ExitStatus.DONE)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _drop_output()
            _stop(
                f"the output cannot be written: {error.strerror}: make room, or write elsewhere", ExitStatus.USAGE
            )
        if os.environ.get(DEBUG):
            raise
        what = str(error) or type(error).__name__
        _stop(f"this is a defect: {type(error).__name__}: {what} ({DEBUG}=1 shows where)", ExitStatus.DEFECT)


def _replace_closed_streams() -> None:
    """Discard what goes to a standard stream that the caller has closed (`>&-`), which Python leaves as None."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:  # in this order each gets its own number back, not a file of the command
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), "r" if name == "stdin" else "w"))


def complete() -> None:
    """Answer kubectl, which runs `kubectl_complete-gpushare` for completions; on an error print nothing."""
    from gpushare.cli.completion import kubectl  # noqa: PLC0415 - only when asked

    try:
        kubectl()
    except Exception:
        if os.environ.get(DEBUG):
            raise


def _run(app: typer.Typer) -> int | None:
    """Run the command that was typed and return its exit status, None for 0.

    Raises:
        UsageError: the words typed are none that it takes.
    """
    command = typer.main.get_command(app)
    try:
        status: int | None = command(prog_name=program(), standalone_mode=False)
    except TyperException as error:
        if not error.format_message():  # a group without a command, whose help typer has printed
            return ExitStatus.USAGE
        raise _usage_error(error.format_message(), command) from error
    return status


def _usage_error(message: str, command: Any) -> UsageError:
    """Return typer's message as one sentence that names the help of the command which was typed."""
    typed = [program()]
    for word in sys.argv[1:]:
        if (found := getattr(command, "commands", {}).get(word)) is not None:
            typed.append(word)
            command = found
    what = " ".join(message.replace("Value error, ", "").split()).rstrip(".")
    see = " See" if what.endswith("?") else "; see"  # typer asks "Did you mean 'top'?"
    return UsageError(f"{what[:1].lower()}{what[1:]}{see} {' '.join(typed)} --help")


def program() -> str:
    """Return the name by which the user called this program (kubectl runs plugins by their file name)."""
    return "kubectl gpushare" if Path(sys.argv[0]).name.startswith("kubectl") else "gpushare"


def _file_of(stream: TextIO) -> tuple[int, int] | None:
    """Return the identity of the file that a stream writes to; None if it has none."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):
        return None
    return found.st_dev, found.st_ino


def _drop_output() -> None:
    """Discard what is left in the buffer of standard output, which would make the interpreter fail at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stop(sentence: str, status: ExitStatus) -> NoReturn:
    typer.echo(f"gpushare: {sentence}", err=True)
    sys.exit(status)
