"""`python -m gpushare_operator run -m gpushare_operator.handlers ...`: Kopf's command line, as `kopf run ...`.

Started by its own `kopf` command, Kopf loads the Kubernetes package's synchronous client of every API, for two
types of it that our handlers never return: 350 modules and 18 MiB resident (ADR 0181).
"""

import sys

import gpushare.kube  # noqa: F401 - first: it takes the transport alone, as long as nobody has the whole package


def _load_kopf() -> None:
    """Import Kopf while `kubernetes.client` looks uninstalled, a case that Kopf supports."""
    client = "kubernetes.client"
    if client in sys.modules:
        return
    sys.modules[client] = None  # type: ignore[assignment]  # Python's own way to make an import fail
    try:
        import kopf  # noqa: F401, PLC0415
    finally:
        del sys.modules[client]


_load_kopf()


def main() -> None:
    """Run Kopf's command line."""
    from kopf import cli  # noqa: PLC0415 - after _load_kopf

    cli.main()


if __name__ == "__main__":
    main()
