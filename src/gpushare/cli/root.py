"""The root command: loads only the command group that is used and prints user errors as one sentence."""

import importlib
import sys
from typing import Final

import typer

from gpushare import __version__
from gpushare.cli.errors import UsageError

# Name -> (module with a `typer.Typer` named app, one line of help). Only the group that is used is imported:
# a help text does not wait for numpy or the Kubernetes client. A group that is one command has a callback
# with `invoke_without_command=True`.
GROUPS: Final[dict[str, tuple[str, str]]] = {
    "top": ("gpushare.cli.top", "Who shares which GPU, at what cap, and how much slower than alone."),
    "sim": ("gpushare.cli.sim", "Simulate placement on a cluster, or jobs that share GPUs."),
    "snapshot": ("gpushare.cli.snapshot", "Read a live cluster into files that sim and plan take."),
    "plan": ("gpushare.cli.plan", "Where pods would go, and why not elsewhere."),
    "mps": ("gpushare.cli.mps", "Look at and act on the MPS daemons and gates of this node."),
    "model": ("gpushare.cli.model", "The interference model and attribution on measured runs."),
    "calibrate": ("gpushare.cli.calibrate", "Measure programs alone and together on this machine's GPU."),
    "profile": ("gpushare.cli.profile", "What a program alone draws from a GPU, pipe by pipe."),
    "pairs": ("gpushare.cli.pairs", "Partner choice on a table of measured pairs of jobs."),
}

# What the extra `fit` installs, by import name: fitting, evaluation and plots need it, nothing on a cluster does.
FIT_MODULES: Final = frozenset({"matplotlib", "networkx", "scipy", "sklearn"})


def build(used: str | None) -> typer.Typer:
    """Build the application with the group `used` loaded and the others by name and help text only."""
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
        app.add_typer(group, name=name, help=text)
    return app


def main() -> None:
    """Run the command line; exit code 2 and one sentence on stderr for any error the user can fix."""
    used = next((argument for argument in sys.argv[1:] if not argument.startswith("-")), None)
    try:
        build(used)(prog_name="gpushare")
    except UsageError as error:
        typer.echo(f"gpushare: {error}", err=True)
        sys.exit(2)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in FIT_MODULES:
            raise
        typer.echo(f'gpushare: this command needs {error.name}: install "gpushare[fit]"', err=True)
        sys.exit(2)
