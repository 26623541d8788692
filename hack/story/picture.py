"""Draw the story's end as one self-contained file, for places where no recording can be played."""

import io
import re
from collections.abc import Sequence
from typing import Final

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.text import Text

_FONTS: Final = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)
_FORMAT: Final = _FONTS.sub("", CONSOLE_SVG_FORMAT)


def svg(lines: Sequence[Text], *, width: int, title: str) -> str:
    """Return lines as a terminal of this many columns shows them."""
    console = Console(
        record=True,
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system="truecolor",
        highlight=False,
    )
    for line in lines:
        console.print(line, soft_wrap=True)
    return console.export_svg(title=title, code_format=_FORMAT, unique_id="demo")
