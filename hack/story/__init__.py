"""The demo's story: pods arrive one after the other, and gpushare's actions are reported as they happen."""
