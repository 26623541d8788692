"""`python -m gpushare_operator.admission --port 8443 --cert-dir /tls`; the environment holds the rest."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from gpushare.core.admission import DEFAULT_MAX_SELECTORS, AdmissionPolicy
from gpushare.core.api import MAX_CLIENTS_PER_POD
from gpushare.core.placement import settings
from gpushare.runtime.logs import log_level_of, set_up_logging
from gpushare.runtime.options import VariableError, Variables, options_of
from gpushare_operator.admission.server import AdmissionServerSettings, serve

# After SIGTERM the endpoints still route here for a moment; requests that arrive then are still answered.
_DRAIN_SECONDS: Final = 5.0


def parse_settings(arguments: Sequence[str], environment: Mapping[str, str]) -> AdmissionServerSettings:
    """Return the settings from the command line and the environment.

    Raises:
        SystemExit: one of them is wrong; the sentence is on stderr, the exit code 2.
    """
    parser = argparse.ArgumentParser(prog="gpushare-admission", description="gpushare's admission webhooks")
    add = options_of(parser, None)
    add("port", 8443, "HTTPS port (default: %(default)s)", type=int)
    add("host", "", "address to listen on (default: all)")
    add("cert-dir", None, "directory with tls.crt and tls.key", type=Path, required=True)
    parsed, variables = parser.parse_args(arguments), Variables(environment)
    try:
        shared = settings.parse_settings(environment)
        policy = AdmissionPolicy(
            shared.defaults,
            variables.text("runtime-class") or None,
            variables.flag("env-caps-fallback"),
            frozenset(variables.words("allowed-env")),
            variables.count("max-selectors", DEFAULT_MAX_SELECTORS),
            variables.count("max-clients-per-pod", MAX_CLIENTS_PER_POD, least=1),
        )
    except (settings.SettingsError, VariableError) as error:
        parser.error(str(error))
    return AdmissionServerSettings(
        parsed.cert_dir,
        parsed.host,
        parsed.port,
        policy,
        gpu_memory_reserve_mib=shared.gpu_memory_reserve_mib,
        joined=shared.joined,
    )


async def _run(server: AdmissionServerSettings) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    loop.add_signal_handler(signal.SIGINT, stop.set)
    loop.add_signal_handler(signal.SIGTERM, lambda: loop.call_later(_DRAIN_SECONDS, stop.set))
    await serve(server, stop)


def main() -> None:
    """Serve until SIGTERM or SIGINT."""
    settings = parse_settings(sys.argv[1:], os.environ)
    set_up_logging(log_level_of())
    try:
        asyncio.run(_run(settings))
    except OSError as error:
        sys.exit(f"gpushare-admission: {settings.certificates}, port {settings.port}: {error}")


if __name__ == "__main__":
    main()
