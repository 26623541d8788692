"""The blocks of code in the pages that people read: how a test runs each, or why none does."""

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
PAGES: Final = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / name
        for name in ("index.md", "install.md", "cli.md", "gpushares.md", "gate.md", "design.md", "comparison.md")
    ),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
)
_FENCE = re.compile(r"^( *)```([\w-]*)[^\n]*\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block; `language` is empty where the page names none."""

    page: str
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"


class Way(Enum):
    """What runs a command."""

    PLUGIN = auto()  # kubectl gpushare, against a fake API server
    FILES = auto()  # gpushare, on small files of the names that the page uses
    PROMETHEUS = auto()  # gpushare, against a real Prometheus
    CLUSTER = auto()  # kubectl and helm, against a real API server
    BASH = auto()
    FISH = auto()


# How a command is run, or why not, by how it begins; the first that fits. A new kind fails until it is here.
COMMANDS: Final[tuple[tuple[str, Way | str], ...]] = (
    ("kubectl krew install", "tests/hack/test_krew.py runs it, with an archive of its own"),
    ("kubectl gpushare --help", "tests/hack/test_krew.py runs it, installed by krew"),
    ("kubectl gpushare", Way.PLUGIN),
    ("kubectl", Way.CLUSTER),
    ("helm install gpu-operator", "NVIDIA's chart comes from a repository that tests cannot rely on"),
    ("helm test", "needs a kubelet and GPUs: tests/e2e/test_first_pod.py runs it, and tests/gpu/chart_suite.py"),
    ("helm", Way.CLUSTER),
    ("gpushare completion fish | source", Way.FISH),
    ("source <(gpushare completion bash)", Way.BASH),
    ("gpushare report --prometheus", Way.PROMETHEUS),
    ("gpushare calibrate", "needs a GPU; tests/cli walks the way with --simulated"),
    ("gpushare model evaluate", "takes minutes; docs/measurements has its last run"),
    ("gpushare profile run", "needs a GPU and the user's program; tests/cli/test_profile.py plays the devices"),
    ("gpushare", Way.FILES),
    ("ln -s ~/.krew/store", Way.BASH),
    (
        "python hack/krew.py",
        "packs every library, which takes minutes even from a folder; tests/hack/test_krew.py packs and installs",
    ),
    (
        "pip install .",
        "installs every library, a minute and a half from a folder; every test runs in what hack/venv installs",
    ),
    (
        "git clone --branch v2.10.0 https://github.com/Project-HAMi/HAMi",
        "fetches HAMi's source, which is not ours",
    ),
    ("cd ", "goes to a checkout that no test has"),
    ("CGO_ENABLED=1 go build", "builds HAMi's source, which no test fetches"),
    (
        "python -m bench hami",
        "needs HAMi's scheduler, and minutes; tests/bench/test_hami.py has it read these arguments",
    ),
    (
        "python -m bench awkward",
        "needs HAMi's scheduler, and minutes; tests/bench/test_hami.py has it read these arguments",
    ),
    ("kind ", "needs Docker; the page says that it was not tried"),
    (
        "docker ",
        "needs Docker's daemon and a registry; tests/e2e run what hack/cluster builds of the same Dockerfile",
    ),
    ("make demo", "needs minutes and a cluster; tests/e2e/test_story.py runs its story"),
    ("make test", "is what runs this"),
)
# Blocks in other languages that no test looks into, by the page and their first line.
NOT_COMMANDS: Final[dict[tuple[str, str], str]] = {
    ("README.md", "pod with gpushare.io/fraction"): "a drawing",
    ("docs/gate.md", "pod (own namespaces)"): "a drawing",
    ("docs/guide/fractions.md", "import os"): "needs PyTorch; its syntax is checked",
    ("docs/guide/slow.md", "import torch"): "needs PyTorch; its counter is compared by tests/cli/test_blocks.py",
}
# Blocks that a named test reads, runs or compares.
READ_BY: Final[dict[tuple[str, str], str]] = {
    ("README.md", "metadata:"): "tests/cli/test_blocks.py",
    ("docs/cli.md", "shop/train-5d4c-p9: target"): "tests/cli/test_targets.py",
    (
        "docs/install.md",
        "accept-nvidia-visible-devices-envvar-when-unprivileged = false",
    ): "tests/cli/test_blocks.py",
    ("docs/design.md", "metadata:"): "tests/cli/test_blocks.py",
    ("docs/gate.md", '{"version": 1, "beat":'): "tests/mps/test_duty.py",
    ("docs/gpushares.md", "metadata:"): "tests/cli/test_blocks.py",
    ("docs/gpushares.md", "gpushare.io/slo-query:"): "tests/cli/test_blocks.py",
    ("docs/gpushares.md", "gpushare.io/slo: rate>20"): "tests/cli/test_blocks.py",
    ("docs/gpushares.md", "policy:"): "tests/chart/test_settings_reach.py",
    ("docs/install.md", "apiVersion: apiserver.config.k8s.io/v1"): "tests/operator/test_agents_on_api_server.py",
    ("docs/guide/autoscaler.md", "k8s.io/cluster-autoscaler/node-template/resources/gpushare.io/share = 800"): (
        "tests/hack/test_autoscaler_nodes.py"
    ),
    ("docs/guide/autoscaler.md", "k8s.io_cluster-autoscaler_node-template_resources_gpushare.io_share = 800"): (
        "tests/hack/test_autoscaler_nodes.py"
    ),
    (
        "docs/guide/autoscaler.md",
        "AUTOSCALER_ENV_VARS:",
    ): "tests/hack/test_autoscaler_nodes.py",
    ("docs/guide/autoscaler.md", "metadata:"): "tests/hack/test_autoscaler_nodes.py",
    ("docs/guide/demo.md", '{"file": "../demo.cast",'): "tests/hack/test_story.py",
    ("docs/guide/first-hour.md", "GPU       MODEL "): "tests/cli/test_guide.py",
    ("docs/guide/first-hour.md", "NAMESPACE  POD "): "tests/cli/test_guide.py",
    ("docs/guide/first-hour.md", "Pod default/first asks for"): "tests/cli/test_guide.py",
    ("docs/guide/mps.md", ""): "tests/mps/test_on_its_own.py",
    ("docs/guide/slow.md", "gpushare.io/slo: p99<50ms"): "tests/cli/test_blocks.py",
    ("docs/guide/slow.md", "shop/serve-7c9f8d6b5-xk2lp: target"): "tests/cli/test_targets.py",
}


def blocks(language: str | None = None) -> Iterator[Block]:
    """Every block of every page, or those of a language."""
    for page in PAGES:
        text = page.read_text()
        name = str(page.relative_to(ROOT))
        for found in _FENCE.finditer(text):
            block = Block(name, text.count("\n", 0, found.start()) + 1, found[2], _unindented(found[3], found[1]))
            if language in {None, block.language}:
                yield block


def _unindented(text: str, margin: str) -> str:
    return "".join(line.removeprefix(margin) for line in text.splitlines(keepends=True))


def commands(way: Way | None = None) -> Iterator[tuple[Block, str]]:
    """Every command of every `sh` block, lines joined where they go on; or those that are run in one way."""
    for block in blocks("sh"):
        for line in block.text.replace("\\\n", " ").splitlines():
            for command in line.split(" && "):
                text = " ".join(command.split())
                if text and not text.startswith("#") and (way is None or how(text) is way):
                    yield block, text


def how(command: str) -> Way | str | None:
    """How a command is run, or the reason why none runs it; None for one that nobody has sorted."""
    return next((way for begins, way in COMMANDS if command.startswith(begins)), None)


def words(command: str) -> list[str]:
    """A command's words, without its comment."""
    return shlex.split(command, comments=True)


def sorted_as(block: Block) -> str | None:
    """Who reads a block that holds no commands, or why nobody does; None for one that nobody has sorted."""
    for (page, begins), reason in {**NOT_COMMANDS, **READ_BY}.items():
        if block.page == page and block.text.lstrip().startswith(begins):
            return reason
    return None
