"""`python -m gpushare_operator.admission --port 8443 --cert-dir /tls`; the environment holds the rest."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpushare.core.admission import DEFAULT_MAX_SELECTORS, AdmissionPolicy
from gpushare.core.placement import settings
from gpushare_operator.admission.server import AdmissionServerSettings, serve

# After SIGTERM the endpoints still route here for a moment; requests that arrive then are still answered.
_DRAIN_SECONDS: Final = 5.0


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> AdmissionServerSettings:
    """Return the settings from the command line and the environment.

    Raises:
        SystemExit: one of them is wrong; the sentence is on stderr, the exit code 2.
    """
    parser = argparse.ArgumentParser(prog="gpushare-admission", description="gpushare's admission webhooks")
    parser.add_argument("--port", type=int, default=8443, help="HTTPS port (default: %(default)s)")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on (default: %(default)s)")
    parser.add_argument("--cert-dir", type=Path, required=True, help="directory with tls.crt and tls.key")
    parsed = parser.parse_args(arguments)
    try:
        defaults = settings.parse_settings(environment).defaults
    except settings.SettingsError as error:
        parser.error(str(error))
    env_caps = environment.get("GPUSHARE_ENV_CAPS_FALLBACK") or "false"
    if env_caps not in ("true", "false"):
        parser.error(f'GPUSHARE_ENV_CAPS_FALLBACK: "{env_caps}" is not true or false')
    runtime_class = environment.get("GPUSHARE_RUNTIME_CLASS") or None
    allowed_env = frozenset((environment.get("GPUSHARE_ALLOWED_ENV") or "").replace(",", " ").split())
    most = environment.get("GPUSHARE_MAX_SELECTORS") or str(DEFAULT_MAX_SELECTORS)
    if not most.isdecimal():
        parser.error(f'GPUSHARE_MAX_SELECTORS: "{most}" is not a number')
    policy = AdmissionPolicy(defaults, runtime_class, env_caps == "true", allowed_env, int(most))
    return AdmissionServerSettings(parsed.cert_dir, parsed.host, parsed.port, policy)


async def _run(server: AdmissionServerSettings) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(_DRAIN_SECONDS, stop.set))
    await serve(server, stop)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = parse_settings(sys.argv[1:], os.environ)
    logging.basicConfig(
        level=os.environ.get("GPUSHARE_LOG_LEVEL") or "INFO",
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    try:
        asyncio.run(_run(settings))
    except OSError as error:
        sys.exit(f"gpushare-admission: {settings.certificates}, port {settings.port}: {error}")


if __name__ == "__main__":
    main()
