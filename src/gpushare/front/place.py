"""The agent's place at kubelet: its socket, its registration and its last list, kept while the agent is away.

To kubelet the front is the device plugin; to the agent it is kubelet: the agent serves the plugin and registers it
as with kubelet, in the front's own folder. Every call is passed on unchanged. Calls from kubelet while the agent
is away wait for the next agent; kubelet itself sets no time limit.

What kubelet needs while no agent serves is also kept in a file, so that another front can take the place over.
While kubelet has no plugin, another file tells the agent why: registered with us, it could not know.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gpushare.core.backoff import Backoff
from gpushare.front.http2 import ConnectionLostError, Http2Connection
from gpushare.front.kubelet_messages import KeptFile, KubeletMessages
from gpushare.front.rpc import CallError, Door, MethodHandler, StatusCode, call, connect, identity, subscribe

_log = logging.getLogger(__name__)

PLUGIN_SOCKET: Final = "gpushare.sock"  # name in the agent's registration
KUBELET_SOCKET: Final = "kubelet.sock"
KEPT_FILE: Final = "kept"
NOTICE_FILE: Final = "unregistered"  # why kubelet has no plugin now, for the agent; absent while it has one
UNWATCHED: Final = "kubelet took the registration, but does not ask for the plugin's list"
REGISTER_PATH: Final = "/v1beta1.Registration/Register"
_PLUGIN: Final = "/v1beta1.DevicePlugin/"
WATCH_PATH: Final = f"{_PLUGIN}ListAndWatch"
OPTIONS_PATH: Final = f"{_PLUGIN}GetDevicePluginOptions"
RELAYED: Final = tuple(_PLUGIN + method for method in ("GetPreferredAllocation", "Allocate", "PreStartContainer"))
ATTEMPTS: Final = 2  # a call that ended two agents is not passed to a third
LOOK_SECONDS: Final = 1.0
QUICK_SECONDS: Final = 0.02  # while kubelet is away: pods bound before we have registered are rejected for good
REGISTER_BACKOFF: Final = Backoff(first_seconds=0.1, longest_seconds=5.0)
SHORT_WATCH_SECONDS: Final = 5.0
ANSWER_SECONDS: Final = 2.0  # in which calls that no agent took are answered, before kubelet's list ends


@dataclass(frozen=True, slots=True)
class Patience:
    """Time limits, in seconds.

    Attributes:
        hold: how long an agent may be away; for so long its last list is kept and calls wait.
        answer: how long a running agent may take to answer before it is killed.
        register: how long kubelet may take to answer our registration.
        agent_register: when the agent's registration is answered at the latest; the agent waits for 10 s.
        no_watch: how long kubelet may not watch after a registration; then we register again.
    """

    hold: float = 60.0
    answer: float = 60.0
    register: float = 10.0
    agent_register: float = 8.0
    no_watch: float = 10.0


class FrontPlace:
    """The connection between kubelet and the agent.

    Args:
        plugins: kubelet's folder of plugin sockets.
        own: folder in which the agent finds us instead of kubelet, and with what a front before us kept.
        kill_agent: ends an agent that hangs.
    """

    def __init__(
        self,
        plugins: Path,
        own: Path,
        kill_agent: Callable[[], None],
        patience: Patience | None = None,
    ) -> None:
        self._kubelet = plugins / KUBELET_SOCKET
        self._own, self._kill_agent = own, kill_agent
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        to_kubelet: dict[str, MethodHandler] = {path: self._relay(path) for path in RELAYED}
        to_kubelet |= {WATCH_PATH: self._watch, OPTIONS_PATH: self._options_of(self._relay(OPTIONS_PATH))}
        self._plugin_door = Door(plugins / PLUGIN_SOCKET, to_kubelet, self._changed)
        self._agent_door = Door(own / KUBELET_SOCKET, {REGISTER_PATH: self._take_registration}, self._changed)
        self._agent: Http2Connection | None = None
        self._gone_at = time.monotonic()
        self._kept, self._keeping = KeptFile(own / KEPT_FILE), threading.Lock()
        self._list: bytes | None = None
        self._registration = self._options = b""
        self._registered: tuple[int, int] | None = None  # identity of the kubelet that we are registered with
        self._unwatched_since = time.monotonic()
        self._watches = 0
        self._short_watches = self._failures = 0
        self._why_not = "no registration has been tried yet"
        self._is_unwatched = False  # for longer than kubelet needs after a registration
        self._notice = own / NOTICE_FILE
        self._noted: str | None = None  # a front before us may have left one
        self._not_before = time.monotonic()
        self._seen: tuple[int, int] | None = None
        self._is_stopping = False

    def open(self) -> None:
        """Let the agent register; until one does, go on with what the front before us kept.

        Raises:
            OSError: our folder cannot have a socket.
        """
        self._agent_door.open()
        if (words := self._kept.read()) is None:
            return
        with self._changed:
            self._registration, self._list, self._options = words.registration, words.devices, words.options
            self._gone_at = time.monotonic()

    @property
    def is_held(self) -> bool:
        """Return whether there is a list worth keeping for the next agent."""
        with self._changed:
            return self._list is not None

    def wait_until_registered(self, seconds: float) -> None:
        """Wait until kubelet has a list that a front before us kept, for so long at most; not without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._list is None or self._registered is not None, seconds)

    def run(self) -> None:
        """Maintain the registration until `stop`."""
        while not self._is_stopping:
            try:
                seconds = self.look()
            except Exception:  # noqa: BLE001 - a full disk, say; nobody else would register us
                _log.exception("the look at kubelet failed, looking again")
                seconds = LOOK_SECONDS
            with self._changed:
                self._changed.wait(min(seconds, LOOK_SECONDS))

    def stop(self) -> None:
        """End all waiting and kubelet's watch, and remove the sockets."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._plugin_door.calls, LOOK_SECONDS)
        self._plugin_door.close()
        self._agent_door.close()

    def _keep(self) -> None:
        with self._keeping:  # what is written last is the latest
            with self._changed:
                devices = self._list
                messages = KubeletMessages(self._registration, devices or b"", self._options)
            if devices is None:
                self._kept.remove()
            else:
                self._kept.write(messages)

    # to kubelet -------------------------------------------------------------------------------------------------

    def _options_of(self, relay: MethodHandler) -> MethodHandler:
        """Answer from what is known: kubelet asks while it takes our registration, also when no agent serves."""

        def options(request: bytes, is_awaited: Callable[[], bool]) -> Iterator[bytes]:
            with self._changed:
                known = self._options if self._agent is None else b""
            if known:
                yield known
                return
            for answer in relay(request, is_awaited):
                with self._changed:
                    is_new, self._options = answer != self._options, answer
                if is_new:
                    self._keep()
                yield answer

        return options

    def _relay(self, path: str) -> MethodHandler:
        def hand_on(request: bytes, is_awaited: Callable[[], bool]) -> Iterator[bytes]:
            for _ in range(ATTEMPTS):
                agent = self._wait_for_agent()
                try:
                    yield call(agent, path, request, self._patience.answer)
                except ConnectionLostError:
                    _log.warning("the agent went away during %s", path)
                    self._lose(agent)
                except TimeoutError:
                    _log.error("the agent did not answer %s in %.0f s: killed", path, self._patience.answer)
                    self._kill_agent()
                    self._lose(agent)
                else:
                    return
                if not is_awaited():
                    return
            raise CallError(StatusCode.UNAVAILABLE, "the gpushare agent of this node ended while it answered")

        return hand_on

    def _wait_for_agent(self) -> Http2Connection:
        with self._changed:
            while self._agent is None:
                left = self._gone_at + self._patience.hold - time.monotonic()
                if left <= 0.0 or self._is_stopping:
                    why = "the gpushare agent of this node has ended"
                    if not self._is_stopping:
                        why += f", and no other has begun to serve within {self._patience.hold:.0f} s"
                    raise CallError(StatusCode.UNAVAILABLE, why)
                self._changed.wait(left)
            return self._agent

    def _watch(self, _: bytes, is_awaited: Callable[[], bool]) -> Iterator[bytes]:
        sent: bytes | None = None
        began = time.monotonic()
        with self._changed:
            self._watches += 1
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(
                        lambda: self._list != sent or self._is_stopping or not is_awaited()  # noqa: B023
                    )
                    if self._list is None or self._is_stopping or not is_awaited():
                        return
                    sent = self._list
                yield sent
        finally:
            with self._changed:
                self._watches -= 1
                if not self._watches and self._list is not None and not self._is_stopping:
                    self._register_again(began)
                self._changed.notify_all()

    def _register_again(self, began: float) -> None:
        """Let the next look register: kubelet has closed its watch, and has marked our devices unhealthy by now.

        It does so when it ends itself, and when it handles the end of another front's connection only after our
        registration, since it looks up whose connection to close by the resource's name (`runClient` of
        kubelet/cm/devicemanager/plugin/v1beta1/server.go, Kubernetes 1.35).

        Args:
            began: when that watch began.
        """
        now = time.monotonic()
        self._short_watches = self._short_watches + 1 if now - began < SHORT_WATCH_SECONDS else 0
        self._registered = None
        self._not_before = now + (REGISTER_BACKOFF.seconds(self._short_watches) if self._short_watches else 0.0)

    def look(self) -> float:
        """Check kubelet's socket and ours once, register if due, and return when to check again."""
        now = time.monotonic()
        kubelet = identity(self._kubelet)
        is_given_up = False
        with self._changed:
            if self._list is not None and self._agent is None and self._is_to_give_up(now - self._gone_at):
                _log.error("no agent for %.0f s: kubelet gets no list any more", self._patience.hold)
                self._list = self._registered = None
                self._changed.notify_all()
                is_given_up = True
            has_list, has_agent, watches = self._list is not None, self._agent is not None, self._watches
        if is_given_up:
            self._keep()
        self._note(self._why_unregistered(kubelet))
        if kubelet != self._seen:
            self._not_before = now
            if kubelet is not None and not has_agent:
                self._agent_door.open()  # a new file there tells a waiting agent that kubelet has restarted
            self._seen = kubelet
        if not has_list:
            return LOOK_SECONDS
        if self._registered == kubelet and self._plugin_door.is_there and kubelet is not None:
            if watches:
                self._unwatched_since, self._is_unwatched = now, False
                self._note("")
                return LOOK_SECONDS
            if now - self._unwatched_since < self._patience.no_watch:
                return QUICK_SECONDS
            self._is_unwatched = True
        if kubelet is None or now < self._not_before or self._is_stopping:
            return QUICK_SECONDS
        self._register(kubelet, now)
        return QUICK_SECONDS

    def _is_to_give_up(self, away_seconds: float) -> bool:
        """Return whether kubelet's list is to end; it closes our connection then, so calls are answered first."""
        over = away_seconds - self._patience.hold
        return over > 0.0 and (over > ANSWER_SECONDS or self._plugin_door.calls <= self._watches)

    def _why_unregistered(self, kubelet: tuple[int, int] | None) -> str:
        """Return why kubelet has no plugin now; empty if it has."""
        if kubelet is None:
            return "kubelet has no socket"
        if self._registered != kubelet or not self._plugin_door.is_there:
            return self._why_not
        return UNWATCHED if self._is_unwatched else ""

    def _note(self, why_not: str) -> None:
        """Leave the agent a notice, as it knows of our registration only what we answered to its own."""
        if why_not == self._noted:
            return
        self._noted = why_not
        new = self._notice.with_suffix(".new")
        try:
            if why_not:
                new.write_text(why_not)
                new.replace(self._notice)
            else:
                self._notice.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("the agent is not told that %s: %s", why_not or "kubelet has the plugin", error)

    def _register(self, kubelet: tuple[int, int], now: float) -> None:
        try:
            if not self._plugin_door.is_there:
                self._plugin_door.open()
            connection = connect(self._kubelet, self._changed)
            try:
                call(connection, REGISTER_PATH, self._registration, self._patience.register)
            finally:
                connection.close()
        except (OSError, CallError, ConnectionLostError) as error:  # TimeoutError is an OSError
            self._failures += 1
            delay = REGISTER_BACKOFF.seconds(self._failures)
            self._not_before = now + delay
            self._why_not = str(error) or "no answer in time"
            _log.warning("kubelet did not take the device plugin, again in %.1f s: %s", delay, self._why_not)
            with self._changed:
                self._registered = None
            return
        self._failures = 0
        self._why_not = "kubelet has restarted, or has closed the plugin's list"
        _log.info("registered the device plugin with kubelet")
        self._note(UNWATCHED if self._is_unwatched else "")  # before the agent has its answer
        with self._changed:
            self._registered, self._unwatched_since = kubelet, time.monotonic()
            self._changed.notify_all()

    # to the agent -----------------------------------------------------------------------------------------------

    def _take_registration(self, request: bytes, _: Callable[[], bool]) -> Iterator[bytes]:
        """Accept a serving agent's registration; answer once kubelet has accepted ours."""
        try:
            agent = connect(self._own / PLUGIN_SOCKET, self._changed)
        except ConnectionLostError as error:
            raise CallError(StatusCode.UNAVAILABLE, f"the plugin does not serve: {error}") from None
        threading.Thread(target=self._follow, args=(agent, request), name="lists", daemon=True).start()
        with self._changed:
            self._changed.wait_for(
                lambda: agent.is_lost or (self._agent is agent and self._registered is not None),
                self._patience.agent_register,
            )
            if self._agent is not agent:
                raise CallError(StatusCode.UNAVAILABLE, "the plugin sends no list")
            if self._registered is None:
                raise CallError(StatusCode.UNAVAILABLE, f"not registered with kubelet: {self._why_not}")
        yield b""

    def _follow(self, agent: Http2Connection, registration: bytes) -> None:
        """Receive an agent's lists until they end; from its first list on this agent is the one in use."""
        try:
            lists = subscribe(agent, WATCH_PATH, b"")
            for first in lists:
                with self._changed:
                    before, self._agent = self._agent, agent
                    self._registration, self._list = registration, first
                    self._changed.notify_all()
                self._keep()
                if before is not None:
                    before.close()
                _log.info("an agent serves")
                break
            for each in lists:
                with self._changed:
                    if self._agent is not agent:
                        continue
                    self._list = each
                    self._changed.notify_all()
                self._keep()
        except (ConnectionLostError, CallError) as error:
            _log.warning("the agent's lists ended: %s", error)
        self._lose(agent)

    def _lose(self, agent: Http2Connection) -> None:
        agent.close()
        with self._changed:
            if self._agent is agent:
                self._agent, self._gone_at = None, time.monotonic()
                self._changed.notify_all()
