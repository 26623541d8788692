"""A plain client of the API server, with the cluster's administrator's certificate; every call has a time-out."""

import http.client
import json
import ssl
import threading
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from devcluster.settings import API_PORT, NODE_IP

TIMEOUT_SECONDS: Final = 2.5  # upper bound on the delay in undoing a fault
_TYPES: Final = {"PATCH": "application/merge-patch+json"}
Json = dict[str, Any]


class NoAnswerError(Exception):
    """The API server did not answer, or failed; it is unknown whether it carried out the request."""


class RefusedError(Exception):
    """The API server refused; `code` is HTTP's."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class ApiConnection:
    """Connection that is reopened when it breaks; for one thread at a time."""

    def __init__(self, pki: Path, server: str = f"https://{NODE_IP}:{API_PORT}") -> None:
        where = urlsplit(server)
        self._host, self._port = where.hostname or "", where.port or 443
        self._context = ssl.create_default_context(cafile=str(pki / "ca.crt"))
        self._context.load_cert_chain(str(pki / "admin.crt"), str(pki / "admin.key"))
        self._connection: http.client.HTTPSConnection | None = None
        self._lock = threading.Lock()

    def get(self, path: str) -> Json:
        """Return an object or a list."""
        return self._ask("GET", path, None)

    def create(self, path: str, body: Json) -> Json:
        return self._ask("POST", path, body)

    def merge(self, path: str, body: Json) -> Json:
        return self._ask("PATCH", path, body)

    def delete(self, path: str, body: Json | None = None) -> Json:
        return self._ask("DELETE", path, body)

    def items(self, path: str) -> list[Json]:
        found: list[Json] = self.get(path).get("items") or []
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = None

    def _ask(self, verb: str, path: str, body: Json | None) -> Json:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPSConnection(
                        self._host, self._port, timeout=TIMEOUT_SECONDS, context=self._context
                    )
                data = None if body is None else json.dumps(body)
                self._connection.request(verb, path, data, {"Content-Type": _TYPES.get(verb, "application/json")})
                answer = self._connection.getresponse()
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                self.close()
                raise NoAnswerError(f"{verb} {path}: {error!r}") from None
        try:
            found: Json = json.loads(text)
        except ValueError:
            raise NoAnswerError(f"{verb} {path}: {answer.status} {text[:200]!r}") from None
        if answer.status >= 500 or answer.status == 429:
            raise NoAnswerError(f"{verb} {path}: {answer.status} {found.get('message')}")
        if answer.status >= 400:
            raise RefusedError(answer.status, str(found.get("message")))
        return found
