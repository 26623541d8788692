"""dcgm-exporter's figures, for GPUs before Hopper, which have no GPM (Volta to Ada)."""

import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

from gpushare.core.gpu import Counters, DevicesError

SCRAPE_SECONDS: Final = 2.0
MAX_BYTES: Final = 16 * 2**20

# DCGM's field identifiers (1001 to 1016); each is a ratio of cycles, 0 to 1.
FIELDS: Final[Mapping[str, str]] = {
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "graphics_util",
    "DCGM_FI_PROF_SM_ACTIVE": "sm_util",
    "DCGM_FI_PROF_SM_OCCUPANCY": "sm_occupancy",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "any_tensor_util",
    "DCGM_FI_PROF_DRAM_ACTIVE": "dram_bw_util",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": "fp64_util",
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": "fp32_util",
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": "fp16_util",
    "DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE": "imma_tensor_util",
    "DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE": "hmma_tensor_util",
    "DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE": "dfma_tensor_util",
    "DCGM_FI_PROF_PIPE_INT_ACTIVE": "integer_util",
}
_INSTANCE_LABEL: Final = "GPU_I_ID"  # a line of one MIG instance, not of the GPU


def parse_exposition(text: str) -> dict[str, Counters]:
    """Parse dcgm-exporter's text into counters by GPU UUID; other metrics and MIG instances are ignored.

    Raises:
        ValueError: not the Prometheus text format.
    """
    found: dict[str, dict[str, float]] = {}
    models: dict[str, str] = {}
    for family in text_string_to_metric_families(text):
        name = FIELDS.get(family.name)
        if name is None:
            continue
        for sample in family.samples:
            uuid = sample.labels.get("UUID", "")
            if not uuid or sample.labels.get(_INSTANCE_LABEL) or not 0 <= sample.value <= 1.5:
                continue
            found.setdefault(uuid, {})[name] = min(1.0, sample.value)
            models[uuid] = sample.labels.get("modelName", "")
    return {uuid: _honest(values, models[uuid]) for uuid, values in found.items()}


def _honest(values: dict[str, float], model: str) -> Counters:
    """Drop the precisions that would read too low because their tensor pipe is not exported on its own.

    Volta's only tensor pipe is HMMA. Elsewhere, while only the sum over tensor pipes is exported, its split
    is unknown: fp16, int8 and, on GPUs with DFMA, fp64 are then unknown, unless the sum is zero.
    """
    tensor = values.get("any_tensor_util", 0.0)
    if "hmma_tensor_util" in values or tensor <= 0.005:
        return Counters(**values)
    if "V100" in model:
        return Counters(**{**values, "hmma_tensor_util": tensor})
    hidden = {"fp16_util", "imma_tensor_util", "hmma_tensor_util"}
    if any(name in model for name in ("A100", "A30", "H100", "H200", "GH200")):
        hidden |= {"fp64_util", "dfma_tensor_util"}
    return Counters(**{name: value for name, value in values.items() if name not in hidden})


class DcgmScrape:
    """Scrapes one dcgm-exporter; one scrape serves all GPUs of a round.

    Args:
        url: its metrics, such as http://127.0.0.1:9400/metrics.
    """

    def __init__(self, url: str) -> None:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"dcgm-exporter's address {url!r} must begin with http:// or https://")
        self._url = url

    def read(self, uuids: Iterable[str]) -> dict[str, Counters]:
        """Counters of these GPUs, as far as they are exported.

        Raises:
            DevicesError: no answer, or not a metrics page.
        """
        try:
            with urllib.request.urlopen(self._url, timeout=SCRAPE_SECONDS) as answer:  # noqa: S310 - http, see above
                text = answer.read(MAX_BYTES).decode()
            parsed = parse_exposition(text)
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise DevicesError(f"dcgm-exporter does not answer: {error}", retryable=True) from error
        wanted = set(uuids)
        return {uuid: counters for uuid, counters in parsed.items() if uuid in wanted}
