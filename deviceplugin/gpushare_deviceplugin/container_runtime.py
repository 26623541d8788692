"""Find out how this node's container runtime gives GPUs to containers: by CDI, by an environment variable.

The container runtime itself is not asked: access to its socket would mean root on the node.
"""

import asyncio
import logging
import re
import tomllib
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import yaml

from gpushare.core.api import Condition, ConditionStatus
from gpushare_deviceplugin.allocation import CDI_KIND, VISIBLE_DEVICES, DeviceListStrategy
from gpushare_deviceplugin.gates import Notice
from gpushare_deviceplugin.state import NodeState

_log = logging.getLogger(__name__)
LOOK_SECONDS: Final = 30.0
_API_SECONDS: Final = 5.0
_VERSION_SECONDS: Final = 600.0  # between two looks at the Node's version: an upgrade drains the node
HONOURED: Final = "GpuVariableHonoured"
# First releases that apply the CRI's field CDIDevices without a setting: in containerd, enable_cdi is on by
# default since 2.0 (its pull request 9621; off in 1.7), in CRI-O since the field exists (1.28).
_CDI_SINCE: Final = {"containerd": (2, 0), "cri-o": (1, 28)}
_VERSION: Final = re.compile(r"^([a-z-]+)://v?(\d+)\.(\d+)")
_LARGEST_SPEC_BYTES: Final = 2 * 2**20
_DEEPEST_SPEC: Final = 50  # a specification nests 6 deep; libyaml's loader recurses without a limit and overflows
_LOADER: Final = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # by libyaml, where PyYAML was built with it
_NOTHING: Final = frozenset({"", "void", "none"})  # values with which the toolkit gives no GPU
# The toolkit's test for privileged: pkg/config/image/privileged.go of nvidia-container-toolkit.
_CAP_SYS_ADMIN: Final = 21
_SETTING: Final = "accept-nvidia-visible-devices-envvar-when-unprivileged"
_ADVICE: Final = "docs/install.md, 'Pods that ask for no share', says how to end that"


_Stamp = tuple[int, int, int]  # a file's mtime in ns, inode and size


class Trust(StrEnum):
    """Whether the runtime gives GPUs to unprivileged containers that name them in NVIDIA_VISIBLE_DEVICES."""

    HONOURED = "Honoured"
    REFUSED = "Refused"
    UNKNOWN = "Unknown"


@dataclass(frozen=True, slots=True)
class Verdict:
    """Conclusion about the variable, with the evidence as a sentence."""

    trust: Trust
    why: str


def why_no_cdi(version: str | None) -> str:
    """Return why a runtime (as the Node names it) may not support CDI; empty if it does."""
    found = _VERSION.match(version or "")
    if found is None:
        return f"the node's container runtime is not known ({version or 'its Node was not read'})"
    since = _CDI_SINCE.get(found[1])
    if since is None or (int(found[2]), int(found[3])) < since:
        return f"{version} does not give devices by CDI unless it is set to: agent.deviceListStrategy=cdi if it is"
    return ""


class CdiSpecifications:
    """The CDI specifications of some directories; a file is read again only once it changed.

    Attributes:
        parsed: how many files were read so far.
    """

    def __init__(self, directories: Iterable[Path]) -> None:
        self.parsed = 0
        self._directories = tuple(directories)
        self._kept: dict[Path, tuple[_Stamp, frozenset[str]]] = {}

    def gpus(self) -> frozenset[str]:
        """Return the CDI names of NVIDIA GPUs; invalid files are ignored, as a container runtime does."""
        kept: dict[Path, tuple[_Stamp, frozenset[str]]] = {}
        for directory in self._directories:
            for path in sorted((*directory.glob("*.json"), *directory.glob("*.yaml"))):
                try:
                    stat = path.stat()
                except OSError:
                    continue
                stamp = (stat.st_mtime_ns, stat.st_ino, stat.st_size)
                before = self._kept.get(path)
                kept[path] = before if before and before[0] == stamp else (stamp, self._read(path, stat.st_size))
        self._kept = kept
        return frozenset().union(*(names for _, names in kept.values()))

    def _read(self, path: Path, size: int) -> frozenset[str]:
        if size > _LARGEST_SPEC_BYTES:
            return frozenset()
        self.parsed += 1
        try:
            spec = _parse(path.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError, ValueError, RecursionError):
            return frozenset()
        if not (isinstance(spec, dict) and spec.get("kind") == CDI_KIND and isinstance(spec.get("devices"), list)):
            return frozenset()
        return frozenset(
            str(each["name"]) for each in spec["devices"] if isinstance(each, dict) and "name" in each
        )


def _parse(text: str) -> object:
    """Parse YAML text (JSON included).

    Raises:
        yaml.YAMLError: the text is not YAML, or nests too deeply.
    """
    depth = 0
    for event in yaml.parse(text, Loader=_LOADER):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST_SPEC:
            raise yaml.YAMLError("nests too deep")
    return yaml.load(text, Loader=_LOADER)  # noqa: S506 - one of the two safe loaders


def is_privileged(status: str) -> bool:
    """Return whether the toolkit treats a process with this /proc/<pid>/status as privileged."""
    sets = re.findall(r"^Cap(?:Eff|Bnd):\s*([0-9a-f]+)$", status, re.MULTILINE)
    return any(int(each, 16) >> _CAP_SYS_ADMIN & 1 for each in sets)


def verdict_of(visible: str | None, *, has_gpus: bool, privileged: bool, settings: str | None) -> Verdict | None:
    """Judge whether the runtime honours the variable; None if it is unknown as yet.

    Args:
        visible: this container's own NVIDIA_VISIBLE_DEVICES, set by the chart; None if it is not set.
        has_gpus: whether the driver answers here.
        privileged: whether this container is; settings: text of the toolkit's config.toml, None if unreadable.
    """
    asks = visible is not None and visible not in _NOTHING
    if asks and has_gpus and not privileged:
        return Verdict(
            Trust.HONOURED,
            f"this agent's own unprivileged container has its GPUs by {VISIBLE_DEVICES}: any pod under the same "
            f"runtime can take every GPU that way, outside MPS. {_ADVICE}",
        )
    accepts = _accepts(settings) if settings is not None else None
    if accepts is False:
        return Verdict(Trust.REFUSED, f"the toolkit's config.toml has {_SETTING} = false")
    if accepts:
        return Verdict(Trust.HONOURED, f"the toolkit's config.toml leaves {_SETTING} on. {_ADVICE}")
    if not has_gpus:
        return None
    return Verdict(
        Trust.UNKNOWN,
        "this agent's container is privileged or has its GPUs in another way, so it proves nothing; with "
        "agent.toolkitDirectory the agent reads the toolkit's setting",
    )


def _accepts(settings: str) -> bool | None:
    """Return the toolkit's setting, true if it is absent; None for text that is not TOML."""
    try:
        return bool(tomllib.loads(settings).get(_SETTING, True))
    except (tomllib.TOMLDecodeError, RecursionError):
        return None


@dataclass(frozen=True, slots=True)
class RuntimeFiles:
    """Paths to read on the node.

    Attributes:
        cdi: directories of CDI specifications; toolkit: the toolkit's config.toml; None: do not read it.
    """

    cdi: Sequence[Path] = ()
    toolkit: Path | None = None
    own_status: Path = Path("/proc/self/status")


class ContainerRuntime:
    """Facts about this node's container runtime; `look` refreshes them.

    Args:
        strategy: from the options; AUTO means CDI if the runtime supports it and specifications offer the GPUs.
        version: asks the API server for the Node's containerRuntimeVersion; None if it is not available now.
        tell: writes an event about the node.
        simulated: whether the GPUs are simulated, which no runtime gives.
    """

    def __init__(
        self,
        state: NodeState,
        strategy: DeviceListStrategy,
        files: RuntimeFiles,
        *,
        version: Callable[[], Awaitable[str | None]],
        tell: Callable[[Notice], Awaitable[None]],
        clock: Callable[[], float],
        environment: Mapping[str, str],
        simulated: bool = False,
    ) -> None:
        self.verdict: Verdict | None = None
        self._state = state
        self._strategy = strategy
        self._files = files
        self._specifications = CdiSpecifications(files.cdi)
        self._ask_version = version
        self._tell = tell
        self._clock = clock
        self._visible = environment.get(VISIBLE_DEVICES)
        self._simulated = simulated
        self._version: str | None = None
        self._version_at: float | None = None
        self._offered: frozenset[str] = frozenset()

    def gives_by_cdi(self, gpu_uuids: Sequence[str]) -> bool:
        """Return whether a container gets these GPUs by CDI."""
        if self._strategy is not DeviceListStrategy.AUTO:
            return self._strategy is DeviceListStrategy.CDI
        return not self._simulated and not self._why_not(gpu_uuids)

    def _why_not(self, gpu_uuids: Collection[str]) -> str:
        if why := why_no_cdi(self._version):
            return why
        missing = sorted(set(gpu_uuids) - self._offered)
        where = ", ".join(map(str, self._files.cdi))
        return f"no CDI specification of {CDI_KIND} in {where} names {', '.join(missing)}" if missing else ""

    def conditions(self) -> tuple[Condition, ...]:
        """Return the GpuNode's conditions about it; none for simulated GPUs, or for what was not checked."""
        if self._simulated:
            return ()
        found = []
        if self._strategy is DeviceListStrategy.AUTO and self._state.gpus:
            why = self._why_not(self._state.gpus)
            status, reason = (ConditionStatus.FALSE, "ByVariable") if why else (ConditionStatus.TRUE, "Specified")
            found.append(Condition(type="GpusByCdi", status=status, reason=reason, message=why[:1024]))
        if self.verdict is not None:
            statuses = {Trust.REFUSED: ConditionStatus.TRUE, Trust.HONOURED: ConditionStatus.FALSE}
            status = statuses.get(self.verdict.trust, ConditionStatus.UNKNOWN)
            reason = self.verdict.trust.value
            found.append(
                Condition(type="GpuVariableRefused", status=status, reason=reason, message=self.verdict.why[:1024])
            )
        return tuple(found)

    async def run(self) -> None:
        """Look again and again until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_SECONDS)

    async def look(self) -> None:
        """Refresh the facts; write an event if the runtime turns out to honour the variable."""
        if self._simulated:
            return
        await self._renew_version()
        before = (self.verdict, self._offered)
        self._offered, self.verdict = await asyncio.to_thread(self._read)
        if (self.verdict, self._offered) != before:
            self._state.touch()
        if self.verdict is None or self.verdict == before[0]:
            return
        _log.info("%s: %s", VISIBLE_DEVICES, self.verdict.why)
        if self.verdict.trust is Trust.HONOURED:
            await self._tell(Notice(None, HONOURED, self.verdict.why))

    async def _renew_version(self) -> None:
        now = self._clock()
        if (
            self._version is not None
            and self._version_at is not None
            and now - self._version_at < _VERSION_SECONDS
        ):
            return
        try:
            async with asyncio.timeout(_API_SECONDS):
                version = await self._ask_version()
        except TimeoutError:
            return
        if version is not None:
            self._version, self._version_at = version, now

    def _read(self) -> tuple[frozenset[str], Verdict | None]:
        files = self._files
        verdict = verdict_of(
            self._visible,
            has_gpus=bool(self._state.gpus) and not self._state.problem,
            privileged=is_privileged(_text(files.own_status) or ""),
            settings=_text(files.toolkit),
        )
        return self._specifications.gpus(), verdict or self.verdict


def _text(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def node_runtime(node: Mapping[str, Any]) -> str | None:
    """Return a Node's containerRuntimeVersion, such as containerd://2.1.4."""
    info = (node.get("status") or {}).get("nodeInfo") or {}
    version = info.get("containerRuntimeVersion")
    return version if isinstance(version, str) else None
