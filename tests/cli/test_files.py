"""Files that users name: refused before the work, written whole, and devices written to instead of replaced."""

import os
import threading
from pathlib import Path

import pytest

from gpushare.cli.errors import UsageError
from gpushare.cli.files import check_named, check_writable, read_lines, read_text, write_whole


def test_a_file_is_replaced_as_a_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for text in ("first", "second, längere"):
        check_writable(page)
        write_whole(page, text)
        assert page.read_text("utf-8") == text
    assert [each.name for each in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("name", ["", "none/page.html", "x" * 300, "x" * 300 + "/page.html"])
def test_what_cannot_be_written_is_told_before_and_after(tmp_path: Path, name: str) -> None:
    """Too long a name fails as one does in a folder that may not be entered, which root may always enter."""
    for refuse in (check_writable, lambda path: write_whole(path, "x")):
        with pytest.raises(UsageError, match="cannot be written"):
            refuse(tmp_path / name)


def test_a_pipe_is_written_to_and_stays_one(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()), daemon=True)
    reader.start()
    check_writable(pipe)
    write_whole(pipe, "through")
    reader.join(30)
    assert read == ["through"]
    assert pipe.is_fifo()


def test_a_link_is_followed_and_stays_one(tmp_path: Path) -> None:
    """As /dev/stdout is one, which root would otherwise replace by a file."""
    (tmp_path / "real").write_text("before")
    link = tmp_path / "link"
    link.symlink_to("real")
    write_whole(link, "after")
    assert link.is_symlink()
    assert (tmp_path / "real").read_text() == "after"


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    table = tmp_path / "excel.csv"
    table.write_bytes(b"\xef\xbb\xbfjob,workload\r\na,b\r\n")
    assert read_lines(table) == ["job,workload", "a,b"]
    assert read_text(table).startswith("job")


def test_a_dash_is_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before: a file of that name."""
    monkeypatch.chdir(tmp_path)
    check_writable(Path("-"))
    write_whole(Path("-"), "längere\n")
    assert capsys.readouterr() == ("längere\n", "")
    assert not list(tmp_path.iterdir())


def test_what_has_to_stay_after_the_command_is_no_standard_output(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a dataset has to have a name"):
        check_named(Path("-"), "a dataset")
    check_named(tmp_path / "-", "a dataset")
