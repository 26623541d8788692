"""`python -m story`: tell the demo's story on a cluster that has gpushare on two simulated GPUs."""

import argparse
import asyncio
import subprocess
import sys
import time
import uuid
from pathlib import Path

from rich.text import Text

from gpushare.cli.access import Where, see
from gpushare.cli.console import out
from gpushare.cli.gain import sentences
from gpushare.kube import EVENTS, Api, ApiError, Json
from story.acts import ACTS, Act
from story.moment import Moment, look
from story.picture import svg
from story.screen import Screen
from story.sentences import of_event

SAMPLES = Path(__file__).resolve().parents[1] / "demo"
IMAGE = "localhost/gpushare:dev"  # in the samples
LOOK_SECONDS = 1.0


class TooLateError(Exception):
    """Something did not happen in time; the message says what, and where to look."""


class Story:
    """Teller of the story, once; the pods stay.

    Args:
        kubectl: the program, with its kubeconfig.
        image: whose tenants the pods run.
    """

    def __init__(self, api: Api, where: Where, screen: Screen, *, kubectl: list[str], image: str) -> None:
        self._api, self._where, self._screen = api, where, screen
        self._kubectl, self._image = kubectl, image
        self._run = uuid.uuid4().hex[:4]
        self._programs: dict[str, str] = {}
        self._past: set[str] = set()

    async def tell(self) -> Moment:
        """Play the acts one after the other; return the last look at the cluster."""
        await self._call("delete", "deployments,pods,gpushares", "--all", "--wait=true")
        self._past = {event["metadata"]["name"] for event in await self._events()}
        for act in ACTS:
            await self._play(act)
        return await self._look()

    async def _play(self, act: Act) -> None:
        if act.says:
            self._screen.say(act.says)
        if act.applies:
            manifest = (SAMPLES / act.applies).read_text().replace(IMAGE, self._image).replace("RUN", self._run)
            await self._call("apply", "-f", "-", stdin=manifest)
        deadline = time.monotonic() + act.seconds
        while True:
            moment = await self._look()
            if (sentence := act.until(moment)) is not None:
                break
            if time.monotonic() > deadline:
                raise TooLateError(f"{act.what}: not within {act.seconds:.0f} s; `gpushare explain` says more")
            await asyncio.sleep(LOOK_SECONDS)
        if sentence:
            self._screen.say(sentence)
        if act.removes:
            await self._call("delete", "pods", "-l", act.removes, "--wait=true")

    async def _look(self) -> Moment:
        """Look at the cluster, show it, and tell what is new."""
        seen = await see(self._api, self._where)
        moment = look(seen, await self._events(), self._programs, self._where.namespace or "")
        self._programs |= moment.programs
        for told in moment.told:
            if told.key not in self._past:
                self._past.add(told.key)
                if (sentence := of_event(told)) is not None:
                    self._screen.say(sentence)
        self._screen.show(moment)
        return moment

    async def _events(self) -> list[Json]:
        return list((await self._api.list(EVENTS, lambda obj: obj, namespace=self._where.namespace)).items)

    async def _call(self, *arguments: str, stdin: str | None = None) -> None:
        command = [*self._kubectl, "-n", self._where.namespace or "", *arguments]
        done = await asyncio.to_thread(
            subprocess.run, command, input=stdin, capture_output=True, text=True, timeout=300, check=False
        )
        if done.returncode:
            raise TooLateError(f"kubectl {' '.join(arguments)}: {done.stderr.strip()}")


async def _tell(arguments: argparse.Namespace) -> None:
    where = Where(arguments.namespace, arguments.kubeconfig)
    kubectl = [arguments.kubectl, f"--kubeconfig={arguments.kubeconfig}"]
    console = out()
    async with where.connect() as api:
        with Screen(console) as screen:
            story = Story(api, where, screen, kubectl=kubectl, image=arguments.image)
            last = await story.tell()
    gained = [Text("What sharing gains now:", "bold"), *map(Text, sentences(last.gain))]
    for line in ["", *gained]:
        console.print(line)
    if arguments.picture is not None:
        lines = [*screen.lines, Text(""), *gained]
        arguments.picture.write_text(svg(lines, width=screen.width, title="make demo"))


def main() -> int:
    parser = argparse.ArgumentParser(prog="story", description=__doc__)
    parser.add_argument("--kubeconfig", required=True)
    parser.add_argument("--namespace", required=True)
    parser.add_argument("--image", required=True, help="gpushare's, on the node")
    parser.add_argument("--kubectl", default="kubectl")
    parser.add_argument("--picture", type=Path, help="where to put a picture of the end, as SVG")
    try:
        asyncio.run(_tell(parser.parse_args()))
    except (ApiError, TooLateError) as error:
        print(f"the story ends early: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
