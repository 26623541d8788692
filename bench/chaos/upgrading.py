"""The stages of an upgrade under churn, one after the other, on the running cluster."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from devcluster.local import LocalCluster
from devcluster.progress import say, wait_for

from bench.chaos import auditor
from bench.chaos.churn import Churn
from bench.chaos.parts import Component
from bench.chaos.setting import Setting, diagnose, set_up
from bench.chaos.upgrade import UpgradeStage, former_sources, install_former, replace_hosts, roll_back, stage

UPGRADE_FILE: Final = "upgrade.json"


def upgrade(
    cluster: LocalCluster,
    directory: Path,
    *,
    former: str,
    image: str,
    install: Callable[[], object],
    seconds: float,
    pods_per_minute: float,
    population: int,
    seed: int,
) -> list[UpgradeStage]:
    """Install the former release, then churn through an upgrade to today's, a rollback and an upgrade again.

    Args:
        image: of the load's pods, on the node already.
        install: installs today's release.
        seconds: of churn after each change.
    """
    sources = former_sources(former, directory / "former")
    install_former(sources)
    replace_hosts(cluster)
    stages: list[UpgradeStage] = []
    with set_up(cluster, image, seed, f"upgrade-{seed}") as setting:
        setting.eye.excused = frozenset({Component.MPS})  # the hosts stay those of the former release
        _wait_until_settled(setting)
        churn = Churn(
            setting.eye, setting.load, setting.freezes, pods_per_minute=pods_per_minute, population=population
        )
        acts: tuple[tuple[str, Callable[[], object]], ...] = (
            ("the former release", lambda: None),
            ("upgrade", install),
            ("rollback", lambda: roll_back(cluster)),
            ("upgrade again", install),
        )
        for name, act in acts:
            say(f"churn: {name}")
            setting.eye.count_parts_anew()
            found = stage(churn, name, act, seconds=seconds, when_done=setting.eye.count_parts_anew)
            stages.append(found)
            if found.violations or found.waited_for:
                diagnose(cluster, directory / f"broken-{len(stages)}")
            (directory / UPGRADE_FILE).write_text(json.dumps([asdict(one) for one in stages], indent=1) + "\n")
            say(f"  {found}")
    return stages


def read_stages(directory: Path) -> list[UpgradeStage]:
    """Return what an upgrade under churn has written."""
    found: list[dict[str, Any]] = json.loads((directory / UPGRADE_FILE).read_text())
    return [
        UpgradeStage(**one | {"waited_for": tuple(one["waited_for"]), "violations": tuple(one["violations"])})
        for one in found
    ]


def _wait_until_settled(setting: Setting) -> None:
    wait_for(
        "every part ready",
        lambda: not auditor.unsettled(setting.eye.picture(), (), ()),
        timeout_seconds=180,
        interval_seconds=1.0,
    )
