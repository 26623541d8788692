"""Reports as one self-contained HTML page (docs/adr/0130-reports-are-one-page.md)."""
