"""dcgm-exporter's pages as several of its versions write them, rendered here by the rules of its source.

From NVIDIA/dcgm-exporter (Apache-2.0): pkg/dcgmexporter/pipeline.go of tags 3.1.8-3.1.5 and 3.3.9-3.6.1 and
internal/pkg/rendermetrics/render_metrics.go of 4.2.0-4.1.0, 4.4.2-4.7.1 and commit d5e5f51 after 4.5.3 write
`NAME{gpu,UUID[,pci_bus_id],device,modelName[,GPU_I_PROFILE,GPU_I_ID][,Hostname][,labels][,attributes]} VALUE`
without escaping; gpu_collector.go prints doubles with %f, leaves out what DCGM has no value for, and writes
"ERROR - FAILED TO CONVERT TO STRING" for a type that it does not know. server.go of the same
tags answers /health.
"""

import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from fakenvml import UUID, installed

from gpushare.core.gpu import Counters, DevicesError
from gpushare.devices import dcgm
from gpushare.devices.dcgm import (
    BACKOFF,
    REPEATS_SECONDS,
    ROUND_SECONDS,
    VERSION_SECONDS,
    DcgmReadings,
    DcgmScrape,
    parse_exposition,
)
from gpushare.devices.nvml import NvmlDevices

A = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
B = "GPU-84412445-5790-0b3f-f714-da8aa3b2c0b0"
FAILED = "ERROR - FAILED TO CONVERT TO STRING"
# Its default-counters.csv names these three fields of profiling alone, the others are comments there.
DEFAULT = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": 0.995630,
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.0,
    "DCGM_FI_PROF_DRAM_ACTIVE": 0.3,
}
ALL = {
    **DEFAULT,
    "DCGM_FI_PROF_SM_ACTIVE": 0.81,
    "DCGM_FI_PROF_SM_OCCUPANCY": 0.25,
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": 0.01,
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": 0.25,
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": 0.02,
}


@dataclass(frozen=True)
class Version:
    """What differs between versions."""

    name: str
    has_pci: bool = True
    hostname: str = "Hostname"
    health: tuple[int, str] = (200, "OK")  # once it has figures
    health_headers: Mapping[str, str] = field(default_factory=dict)
    reads_when_asked: bool = True


VERSIONS = (
    Version("3.1.8-3.1.5", has_pci=False, reads_when_asked=False),
    Version("3.3.9-3.6.1", reads_when_asked=False),
    Version("4.2.0-4.1.0", health=(200, "KO")),
    Version("4.4.2-4.7.1", health=(200, "KO")),
    Version("after 4.5.3-4.8.2", hostname="hostname", health_headers={"X-Registry-Available": "true"}),
)
versions = pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)


@dataclass(frozen=True)
class Gpu:
    uuid: str
    values: Mapping[str, float | str]
    index: int = 0
    model: str = "NVIDIA A100-SXM4-80GB"
    mig: tuple[str, int] | None = None
    extra: Mapping[str, str] = field(default_factory=dict)


def page(version: Version, *gpus: Gpu) -> str:
    """Return what the exporter answers; fields in the order of their first GPU."""
    names = list(dict.fromkeys(name for gpu in gpus for name in gpu.values))
    text = ""
    for name in names:
        text += f"# HELP {name} What it is (in some unit).\n# TYPE {name} gauge\n"
        for gpu in gpus:
            if name in gpu.values:
                value = gpu.values[name]
                written = f"{value:f}" if isinstance(value, float) else value
                text += f"{name}{{{_labels(version, gpu)}}} {written}\n"
    return text


def _labels(version: Version, gpu: Gpu) -> str:
    labels: dict[str, str] = {"gpu": str(gpu.index), "UUID": gpu.uuid}
    if version.has_pci:
        labels["pci_bus_id"] = f"00000000:0{gpu.index}:04.0"
    labels |= {"device": f"nvidia{gpu.index}", "modelName": gpu.model}
    if gpu.mig is not None:
        labels |= {"GPU_I_PROFILE": gpu.mig[0], "GPU_I_ID": str(gpu.mig[1])}
    labels |= {version.hostname: "n1", "DCGM_FI_DRIVER_VERSION": "535.161.08", **gpu.extra}
    return ",".join(f'{name}="{value}"' for name, value in labels.items())


@versions
def test_every_version_is_read_with_and_without_pods_labels(version: Version) -> None:
    pods = {"container": "main", "namespace": "shop", "pod": "web-0", "pod_uid": "1-2", "vgpu": "3"}
    text = page(
        version,
        Gpu(A, {"DCGM_FI_DEV_GPU_UTIL": "97", **ALL}, extra=pods),
        Gpu(B, {"DCGM_FI_DEV_GPU_UTIL": "3", **ALL, "DCGM_FI_PROF_SM_ACTIVE": 0.5}, index=1),
    )
    read = parse_exposition(text)
    assert set(read) == {A, B}
    assert (read[A].sm_util, read[A].sm_occupancy, read[A].dram_bw_util) == (0.81, 0.25, 0.3)
    assert read[A].graphics_util == pytest.approx(0.99563)
    assert (read[A].fp64_util, read[A].fp32_util, read[A].fp16_util) == (0.01, 0.25, 0.02)
    assert read[B].sm_util == 0.5


@versions
def test_its_default_list_of_fields_leaves_sm_activity_out(version: Version) -> None:
    counters = parse_exposition(page(version, Gpu(A, {"DCGM_FI_DEV_SM_CLOCK": "1410", **DEFAULT})))[A]
    assert counters.sm_util is None
    assert counters.dram_bw_util == 0.3


@versions
def test_without_dcp_there_are_no_lines_of_profiling(version: Version) -> None:
    text = page(version, Gpu(A, {"DCGM_FI_DEV_GPU_UTIL": "97", "DCGM_FI_DEV_XID_ERRORS": "0"}))
    assert parse_exposition(text) == {}


@versions
def test_mig_instances_are_not_the_gpu(version: Version) -> None:
    text = page(
        version,
        Gpu(A, ALL, mig=("1g.10gb", 13)),
        Gpu(A, ALL, mig=("2g.20gb", 5)),
        Gpu(B, {**ALL, "DCGM_FI_PROF_SM_ACTIVE": 0.4}, index=1),
    )
    read = parse_exposition(text)
    assert set(read) == {B}
    assert read[B].sm_util == 0.4


@versions
@pytest.mark.parametrize("value", [FAILED, "140737488355328.000000", "NaN", "", "-1.000000"])
def test_a_value_that_is_none_leaves_the_other_fields_and_gpus_alone(version: Version, value: str) -> None:
    text = page(
        version,
        Gpu(A, {**ALL, "DCGM_FI_PROF_PIPE_FP16_ACTIVE": value, "DCGM_FI_DEV_FB_USED": FAILED}),
        Gpu(B, ALL, index=1),
    )
    read = parse_exposition(text)
    assert read[A].fp16_util is None
    assert read[A].sm_util == 0.81
    assert read[B].fp16_util == 0.02


@versions
def test_labels_are_not_escaped_there(version: Version) -> None:
    odd = {"err_msg": 'said "no", and {more}', "pod": "web-0"}
    read = parse_exposition(page(version, Gpu(A, ALL, extra=odd)))
    assert read[A].sm_util == 0.81


def test_the_old_namespace_has_other_names_and_is_not_read() -> None:
    text = f'dcgm_fi_prof_dram_active{{gpu="0",uuid="{A}",device="nvidia0",modelName="Tesla V100"}} 0.3\n'
    assert parse_exposition(text) == {}


@pytest.mark.parametrize(
    ("model", "has_dfma"),
    [
        ("NVIDIA A100-SXM4-80GB", True),
        ("NVIDIA-A100-SXM4-80GB", True),  # --replace-blanks-in-model-name
        ("NVIDIA A30", True),
        ("NVIDIA RTX A1000", False),
        ("NVIDIA RTX A3000 Laptop GPU", False),
        ("NVIDIA L40S", False),
        ("Tesla T4", False),
    ],
)
def test_fp64_is_hidden_where_the_sum_of_tensor_pipes_may_hold_some_of_it(model: str, has_dfma: bool) -> None:
    busy = {**ALL, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4}
    counters = parse_exposition(page(VERSIONS[-1], Gpu(A, busy, model=model)))[A]
    assert (counters.fp64_util is None) is has_dfma
    assert counters.fp16_util is None


@pytest.mark.parametrize("value", [FAILED, "NaN", None])
def test_a_sum_of_tensor_pipes_that_is_unknown_is_not_zero(value: str | None) -> None:
    """It may be missing from one page alone, or from the exporter's list: what it would hide is unknown too."""
    fields = {name: each for name, each in ALL.items() if name != "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"}
    if value is not None:
        fields["DCGM_FI_PROF_PIPE_TENSOR_ACTIVE"] = value
    counters = parse_exposition(page(VERSIONS[-1], Gpu(A, fields, model="NVIDIA A100-SXM4-80GB")))[A]
    assert (counters.fp16_util, counters.fp64_util, counters.fp32_util) == (None, None, 0.25)


def test_one_tensor_pipe_that_is_missing_hides_its_own_precision_alone() -> None:
    fields = {**ALL, "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": 0.4, "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE": 0.1}
    counters = parse_exposition(page(VERSIONS[-1], Gpu(A, fields, model="NVIDIA A100-SXM4-80GB")))[A]
    assert counters.fp64_util is None, "the rest of the sum may be DFMA's"
    assert counters.pipes()["fp16"] == pytest.approx(0.12)


def test_a_page_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="not a line of metrics"):
        parse_exposition("<html><body>sign in</body></html>")


# -- the same reading twice


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_reading_is_counted_once_until_the_exporters_next() -> None:
    clock = Clock()
    readings = DcgmReadings(clock)
    busy, idle = Counters(sm_util=0.5, dram_bw_util=0.2), Counters(sm_util=0.0, dram_bw_util=0.000012)
    assert readings.window(busy) is None  # since when is not known
    windows = []
    for second in range(1, 61):
        clock.now = float(second)
        counters = Counters(sm_util=0.5, dram_bw_util=0.2) if second < 30 else Counters(sm_util=0.4)
        windows.append(readings.window(counters))
    assert [second + 1 for second, window in enumerate(windows) if window] == [30]
    assert windows[29] == 30.0
    clock.now = 30.0 + REPEATS_SECONDS
    assert readings.window(Counters(sm_util=0.4)) == REPEATS_SECONDS  # as even as that, but it lives
    clock.now += 1.0
    assert readings.window(idle) == 1.0
    clock.now += 1.0
    assert readings.window(idle) == 1.0


def test_an_exporter_that_was_away_for_long_has_not_read_for_long() -> None:
    clock = Clock()
    readings = DcgmReadings(clock)
    readings.window(Counters(sm_util=0.5))
    clock.now = 30.0
    assert readings.window(Counters(sm_util=0.4)) == 30.0
    clock.now += 1800.0  # no page, or no line of this GPU
    assert readings.window(Counters(sm_util=0.9)) == REPEATS_SECONDS
    clock.now += 30.0
    assert readings.window(Counters(sm_util=0.8)) == 30.0


@contextmanager
def exporter(answers: Sequence[tuple[int, str]], health: Sequence[Version] = ()) -> Iterator[str]:
    """An exporter that gives these answers one after the other, and the last one for ever.

    Args:
        health: whose health pages it gives, in the same way; without any it has none.
    """
    left, versions_left = list(answers), list(health)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            headers: Mapping[str, str] = {}
            if self.path == "/health" and versions_left:
                version = versions_left.pop(0) if len(versions_left) > 1 else versions_left[0]
                (code, text), headers = version.health, version.health_headers
            elif self.path == "/health":
                code, text = 404, "404 page not found"
            else:
                code, text = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(code)
            self.send_header("Content-Type", "text/plain; charset=utf-8")
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/metrics"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_over_http_an_exporter_that_starts_anew_is_waited_for() -> None:
    """After its start the exporter has no figures of profiling yet: no line, and no word of zero."""
    before, after = Gpu(A, ALL), Gpu(A, {**ALL, "DCGM_FI_PROF_SM_ACTIVE": 0.1})
    begun = page(VERSIONS[-1], Gpu(A, {"DCGM_FI_DEV_GPU_UTIL": "0"}))
    pages = [(200, page(VERSIONS[-1], before)), (500, "error"), (200, begun), (200, page(VERSIONS[-1], after))]
    with exporter(pages) as url:
        clock = Clock()
        scrape = DcgmScrape(url, clock)
        assert scrape.read([A, B])[A].sm_util == 0.81
        for _ in range(2):  # the second time without asking
            with pytest.raises(DevicesError, match="HTTP Error 500"):
                scrape.read([A])
        clock.now += BACKOFF.seconds(1)
        assert scrape.read([A]) == {}
        assert scrape.read([A])[A].sm_util == 0.1


def test_the_devices_count_the_exporters_readings_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    first = page(VERSIONS[2], Gpu(UUID, ALL))
    second = page(VERSIONS[2], Gpu(UUID, {**ALL, "DCGM_FI_PROF_SM_ACTIVE": 0.6}))
    with (
        installed(monkeypatch) as driver,
        exporter([(200, first), (200, first), (200, second)], [VERSIONS[2]]) as url,
    ):
        driver.has_gpm = False
        devices = NvmlDevices.open(clock, url)
        samples = []
        for now in (0.0, 1.0, 2.0, 3.0):
            clock.now = now
            samples.append(devices.sample(UUID))
        devices.close()
    assert samples[:3] == [None, None, None]
    (last,) = samples[3:]
    assert last is not None
    assert (last.counters.sm_util, last.window_seconds) == (0.6, 2.0)
    assert last.reach_seconds == REPEATS_SECONDS, (
        "its interval is not known yet, but that it reads when it is asked"
    )


@versions
def test_how_far_back_a_reading_reaches_depends_on_when_the_exporter_reads(version: Version) -> None:
    with exporter([(200, page(version, Gpu(A, ALL)))], [version]) as url:
        assert DcgmScrape(url).reach_intervals() == (1 if version.reads_when_asked else 2)


@pytest.mark.parametrize(
    "health",
    [
        None,
        Version("3.3 without figures", health=(503, "KO")),
        Version("not UTF-8", health=(200, "KO, and more")),
        Version("of something else", health=(200, "<html><body>sign in</body></html>")),
    ],
    ids=str,
)
def test_an_exporter_whose_version_cannot_be_told_is_taken_for_an_old_one(health: Version | None) -> None:
    with exporter([(200, "")], [health] if health is not None else []) as url:
        assert DcgmScrape(url).reach_intervals() == 2


def test_a_health_page_that_hangs_costs_half_a_second_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, over = Clock(), [], threading.Event()

    def hang(*_: object, **__: object) -> None:
        asked.append(clock.now)
        over.wait()
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    monkeypatch.setattr(dcgm, "_HEALTH_SECONDS", 0.05)
    scrape = DcgmScrape("http://exporter/metrics", clock)
    for _ in range(60):
        assert scrape.reach_intervals() == 2
        clock.now += 1.0
    over.set()
    assert asked == [0.0]


def test_another_exporter_in_its_place_is_looked_at_anew() -> None:
    old, new = VERSIONS[0], VERSIONS[-1]
    text = page(new, Gpu(A, ALL))
    with exporter([(200, text), (500, "error"), (200, text)], [new, old, new, new]) as url:
        clock = Clock()
        scrape = DcgmScrape(url, clock)
        scrape.read([A])
        assert scrape.reach_intervals() == 1
        with pytest.raises(DevicesError):
            scrape.read([A])
        assert scrape.reach_intervals() == 2, "the former release after a failed upgrade"
        clock.now += VERSION_SECONDS
        assert scrape.reach_intervals() == 1


def test_one_page_serves_all_gpus_of_a_round_and_none_of_the_next() -> None:
    clock = Clock()
    values = [{**ALL, "DCGM_FI_PROF_SM_ACTIVE": ratio} for ratio in (0.1, 0.2, 0.3, 0.4)]
    with exporter([(200, page(VERSIONS[-1], Gpu(A, value), Gpu(B, value))) for value in values]) as url:
        scrape = DcgmScrape(url, clock)

        def sm_util(uuid: str) -> float | None:
            return scrape.read([uuid])[uuid].sm_util

        assert [sm_util(A), sm_util(B)] == [0.1, 0.1]
        assert [sm_util(A), sm_util(A)] == [0.2, 0.3]
        clock.now += ROUND_SECONDS
        assert sm_util(B) == 0.3
        clock.now += 0.1
        assert scrape.read(["GPU-that-it-does-not-know"]) == {}
        assert sm_util(A) == 0.4, "too old for any"


def read_for_a_minute(scrape: DcgmScrape, clock: Clock) -> None:
    for _ in range(60):
        for uuid in (A, B):
            with pytest.raises(DevicesError, match="dcgm-exporter does not answer: "):
                scrape.read([uuid])
        clock.now += 1.0


def asked_in_a_minute(monkeypatch: pytest.MonkeyPatch, failure: Callable[[float], OSError]) -> list[float]:
    """Return the seconds at which an exporter is asked that fails each time, with the error of that second."""
    clock, asked = Clock(), []

    def fail(*_: object, **__: object) -> None:
        asked.append(clock.now)
        raise failure(clock.now)

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    read_for_a_minute(DcgmScrape("http://exporter/metrics", clock), clock)
    return asked


def test_one_that_does_not_answer_is_asked_once_for_all_gpus_and_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asked_in_a_minute(monkeypatch, lambda _: TimeoutError("timed out"))
    assert asked == [0.0, 2.0, 6.0, 14.0, 30.0]


def test_one_that_fails_at_once_is_asked_every_two_seconds_as_it_may_be_restarting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late, refused = TimeoutError("timed out"), urllib.error.URLError("Connection refused")
    asked = asked_in_a_minute(monkeypatch, lambda second: late if second < 20.0 else refused)
    assert asked == [0.0, 2.0, 6.0, 14.0, *(float(second) for second in range(30, 60, 2))]


def test_one_that_gives_its_page_drop_by_drop_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, over = Clock(), [], threading.Event()

    def hang(*_: object, **__: object) -> None:
        asked.append(clock.now)
        over.wait()
        raise TimeoutError("timed out")

    monkeypatch.setattr(urllib.request, "urlopen", hang)
    monkeypatch.setattr(dcgm, "SCRAPE_SECONDS", 0.05)
    scrape = DcgmScrape("http://exporter/metrics", clock)
    waited = threading.Thread(target=read_for_a_minute, args=(scrape, clock), daemon=True)
    waited.start()
    waited.join(30.0)
    is_over = not waited.is_alive()
    over.set()
    assert is_over
    assert scrape._hanging is not None
    scrape._hanging.join()
    assert len(asked) == 1, "no second request beside the one that hangs"


def test_what_is_no_http_is_an_exporter_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        scrape = DcgmScrape(f"http://127.0.0.1:{server.getsockname()[1]}/metrics")
        with pytest.raises(DevicesError, match="does not answer"):
            scrape.read([A])
        thread.join()
