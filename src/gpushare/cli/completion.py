"""`gpushare completion`: scripts for bash, zsh and fish, and the words that they offer."""

import asyncio
import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Final

import typer

from gpushare.cli.access import Where, ask
from gpushare.cli.errors import CommandError
from gpushare.core.api import MANAGED_SELECTOR
from gpushare.kube import NAMESPACES, PODS, Api, Json, Listing

app = typer.Typer(help=__doc__)

_PATIENCE_SECONDS: Final = 3.0  # the user has pressed the tab key and waits
_NO_FILES: Final = ":4"  # read by kubectl after the words: offer these and no file names


class Shell(StrEnum):
    """The shells that a script is printed for."""

    BASH = "bash"
    ZSH = "zsh"
    FISH = "fish"


_BASH: Final = """\
_gpushare_complete() {
    local IFS=$'\\n'
    COMPREPLY=($("${COMP_WORDS[0]}" completion words -- "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -gt 0 ]] || compopt -o default
}
complete -F _gpushare_complete gpushare kubectl-gpushare
"""
_ZSH: Final = """\
#compdef gpushare kubectl-gpushare
_gpushare_complete() {
    local -a found
    found=("${(@f)$("${words[1]}" completion words -- "${(@)words[2,$CURRENT]}" 2>/dev/null)}")
    if [[ -n "${found[1]}" ]]; then compadd -- "${found[@]}"; else _files; fi
}
compdef _gpushare_complete gpushare kubectl-gpushare
"""
_FISH: Final = """\
function __gpushare_complete
    set -l words (commandline -opc) (commandline -ct)
    $words[1] completion words -- $words[2..-1] 2>/dev/null
end
complete -c gpushare -f -a '(__gpushare_complete)'
complete -c kubectl-gpushare -f -a '(__gpushare_complete)'
"""
SCRIPTS: Final[Mapping[Shell, str]] = {Shell.BASH: _BASH, Shell.ZSH: _ZSH, Shell.FISH: _FISH}


@app.command("bash")
def bash() -> None:
    """Print the script for bash: source <(gpushare completion bash)."""
    typer.echo(SCRIPTS[Shell.BASH], nl=False)


@app.command("zsh")
def zsh() -> None:
    """Print the script for zsh: source <(gpushare completion zsh), after compinit."""
    typer.echo(SCRIPTS[Shell.ZSH], nl=False)


@app.command("fish")
def fish() -> None:
    """Print the script for fish: gpushare completion fish | source."""
    typer.echo(SCRIPTS[Shell.FISH], nl=False)


@app.command("words", hidden=True, context_settings={"ignore_unknown_options": True})
def words(typed: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Print the possible completions of the last word, one per line; the last word may be empty."""
    for word in offered(typed or [""]):
        typer.echo(word)


def kubectl() -> None:
    """Answer kubectl, which runs `kubectl_complete-gpushare` with the words typed so far."""
    for word in offered(sys.argv[1:] or [""]):
        typer.echo(word)
    typer.echo(_NO_FILES)


def offered(
    typed: Sequence[str], *, from_cluster: Mapping[str, Callable[[Where], Iterable[str]]] | None = None
) -> list[str]:
    """Return possible completions of the last word; none if it is a file name or free text.

    Args:
        from_cluster: sources of pod and namespace names; default: the cluster itself.
    """
    *before, last = typed
    node, taken = _command(before)
    if node is None:
        return []
    wanted = _awaited(node, taken)
    if wanted is not None:
        return sorted(each for each in _values(node, wanted, before, from_cluster) if each.startswith(last))
    found = [option for each in node.params for option in each.opts if option.startswith("--") and not each.hidden]
    if not last.startswith("-"):
        commands = getattr(node, "commands", None) or {}
        found = [name for name, each in commands.items() if not each.hidden]
        argument = next((each for each in node.params if each.param_type_name == "argument"), None)
        if argument is not None and not any(not word.startswith("-") for word in _plain(node, taken)):
            found += _values(node, argument, before, from_cluster)
    return sorted(each for each in found if each.startswith(last))


def _command(before: Sequence[str]) -> tuple[Any, list[str]]:
    """Return the command that the words lead to, and the words after its name; None if it is unknown."""
    from gpushare.cli.root import build  # noqa: PLC0415 - root lists this module

    used = next((word for word in before if not word.startswith("-")), None)
    node: Any = typer.main.get_command(build(used))
    rest = list(before)
    while rest and (commands := getattr(node, "commands", None)):
        at = next((index for index, word in enumerate(rest) if not word.startswith("-")), None)
        if at is None:
            break
        if rest[at] not in commands:
            return None, []
        node, rest = commands[rest[at]], rest[at + 1 :]
    return node, rest


def _awaited(node: Any, taken: Sequence[str]) -> Any | None:
    """Return the option that expects the next word as its value, or None."""
    if not taken:
        return None
    found = (each for each in node.params if taken[-1] in each.opts and not getattr(each, "is_flag", False))
    return next(found, None)


def _plain(node: Any, taken: Sequence[str]) -> list[str]:
    """Return the words that are neither options nor values of options."""
    return [word for at, word in enumerate(taken) if _awaited(node, taken[:at]) is None]


def _values(
    node: Any,
    parameter: Any,
    before: Sequence[str],
    from_cluster: Mapping[str, Callable[[Where], Iterable[str]]] | None,
) -> list[str]:
    source = (from_cluster or _SOURCES).get(parameter.name)
    if source is not None:
        return list(source(_where(before)))
    context = node.make_context(node.name, [], resilient_parsing=True)
    return [str(each.value) for each in parameter.shell_complete(context, "") if each.type == "plain"]


def _where(before: Sequence[str]) -> Where:
    """Return the cluster and namespace that the words so far name."""
    named = {"-n": "", "--namespace": "", "--kubeconfig": "", "--context": ""}
    for name, value in pairwise(before):
        if name in named:
            named[name] = value
    return Where(
        named["-n"] or named["--namespace"] or None, named["--kubeconfig"] or None, named["--context"] or None
    )


def _pods(where: Where) -> list[str]:
    namespace = where.current_namespace()
    return _asked(where, lambda api: api.list(PODS, _name, namespace=namespace, label_selector=MANAGED_SELECTOR))


def _namespaces(where: Where) -> list[str]:
    return _asked(where, lambda api: api.list(NAMESPACES, _name))


def _asked(where: Where, listing: Callable[[Api], Awaitable[Listing[str]]]) -> list[str]:
    """Return names from the cluster; none if it does not answer within the time a person waits at the prompt."""

    async def in_time(api: Api) -> Listing[str]:
        async with asyncio.timeout(_PATIENCE_SECONDS):
            return await listing(api)

    try:
        return ask(where, in_time).items
    except (CommandError, TimeoutError):
        return []


def _name(obj: Json) -> str:
    return str(obj["metadata"]["name"])


_SOURCES: Final[Mapping[str, Callable[[Where], Iterable[str]]]] = {"pod": _pods, "namespace": _namespaces}
