"""The pictures of the report: the site has all that the command takes, and the command takes them."""

import struct
import subprocess
from pathlib import Path

import pytest
import report_pictures
from browser import chromium

ROOT = Path(__file__).resolve().parents[2]
GUIDE = ROOT / "docs" / "guide"


def size_of(picture: Path) -> tuple[int, int]:
    """Width and height, from the head of a PNG file."""
    head = picture.read_bytes()[:24]
    assert head.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", head[16:24])
    return width, height


def test_the_site_shows_every_picture_that_is_taken() -> None:
    taken = {shot.name: (shot.width * shot.scale, shot.height * shot.scale) for shot in report_pictures.SHOTS}
    assert {picture.name: size_of(picture) for picture in GUIDE.glob("report*.png")} == taken
    page = (GUIDE / "monitoring.md").read_text()
    assert [name for name in taken if f"]({name})" not in page] == []


def test_one_command_takes_the_recording_and_the_pictures() -> None:
    done = subprocess.run(
        ["make", "-n", "demo-record"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    commands = [line for line in done.stdout.splitlines() if "hack/" in line]
    assert "hack/cluster demo-record docs/guide/demo.cast" in commands
    assert any(line.endswith("hack/report_pictures.py") for line in commands)


@pytest.mark.slow
def test_they_are_taken_without_a_cluster(tmp_path: Path) -> None:
    file = report_pictures.page(tmp_path)
    with chromium() as browser:
        for shot in report_pictures.SHOTS:
            report_pictures.take(browser, file, shot, tmp_path)
            assert size_of(tmp_path / shot.name) == (shot.width * shot.scale, shot.height * shot.scale)
