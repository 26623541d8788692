"""A hook of mkdocs: links of pages to sources, which are not part of the site, become plain words."""

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\((?:\.\./)+(?:src|operator|deviceplugin|tests|hack|helm|bench|README)[^)]*\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _OUTSIDE.sub(r"\1", markdown)
