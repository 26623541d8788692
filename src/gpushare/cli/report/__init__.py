"""Reports as one HTML page that needs nothing beside itself (docs/adr/0130-reports-are-one-page.md)."""
