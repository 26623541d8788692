"""dcgm-exporter's text in its documented format: HELP, TYPE, and labels gpu, UUID, device, modelName, Hostname."""

import pytest

from gpushare.core.gpu import DevicesError
from gpushare.devices.dcgm import DcgmScrape, parse_exposition

A = "GPU-604ac76c-d9cf-fef3-62e9-d92044ab6e52"
B = "GPU-84412445-5790-0b3f-f714-da8aa3b2c0b0"


def page(model: str, extra: str = "") -> str:
    labels = f'gpu="0",UUID="{A}",pci_bus_id="00000000:00:04.0",device="nvidia0",modelName="{model}",Hostname="n1"'
    return f"""# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{labels},container="main",namespace="shop",pod="web-0"}} 97
# HELP DCGM_FI_PROF_GR_ENGINE_ACTIVE Ratio of time the graphics engine is active.
# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{labels},container="main",namespace="shop",pod="web-0"}} 0.995630
# HELP DCGM_FI_PROF_SM_ACTIVE The ratio of cycles an SM has at least 1 warp assigned.
# TYPE DCGM_FI_PROF_SM_ACTIVE gauge
DCGM_FI_PROF_SM_ACTIVE{{{labels}}} 0.810000
# HELP DCGM_FI_PROF_PIPE_TENSOR_ACTIVE Ratio of cycles the tensor (HMMA) pipe is active.
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{labels}}} 0.400000
# HELP DCGM_FI_PROF_PIPE_FP64_ACTIVE Ratio of cycles the fp64 pipes are active.
# TYPE DCGM_FI_PROF_PIPE_FP64_ACTIVE gauge
DCGM_FI_PROF_PIPE_FP64_ACTIVE{{{labels}}} 0.010000
# HELP DCGM_FI_PROF_PIPE_FP32_ACTIVE Ratio of cycles the fp32 pipes are active.
# TYPE DCGM_FI_PROF_PIPE_FP32_ACTIVE gauge
DCGM_FI_PROF_PIPE_FP32_ACTIVE{{{labels}}} 0.250000
# HELP DCGM_FI_PROF_PIPE_FP16_ACTIVE Ratio of cycles the fp16 pipes are active.
# TYPE DCGM_FI_PROF_PIPE_FP16_ACTIVE gauge
DCGM_FI_PROF_PIPE_FP16_ACTIVE{{{labels}}} 0.020000
# HELP DCGM_FI_PROF_DRAM_ACTIVE Ratio of cycles the device memory interface is active.
# TYPE DCGM_FI_PROF_DRAM_ACTIVE gauge
DCGM_FI_PROF_DRAM_ACTIVE{{{labels}}} 0.300000
DCGM_FI_PROF_DRAM_ACTIVE{{gpu="1",UUID="{B}",device="nvidia1",modelName="{model}",Hostname="n1"}} 0.500000
DCGM_FI_PROF_DRAM_ACTIVE{{gpu="2",UUID="{B}",GPU_I_PROFILE="1g.5gb",GPU_I_ID="13",Hostname="n1"}} 0.900000
{extra}"""


def test_volta_has_one_tensor_pipe() -> None:
    counters = parse_exposition(page("Tesla V100-SXM2-16GB"))[A]
    assert counters.pipes() == pytest.approx({"fp16": 0.42, "fp32": 0.25, "fp64": 0.01, "dram": 0.3})
    assert (counters.sm_util, counters.graphics_util) == (0.81, 0.99563)


def test_precisions_hidden_behind_the_sum_of_tensor_pipes_are_absent() -> None:
    ampere = parse_exposition(page("NVIDIA A100-SXM4-80GB"))[A].pipes()
    assert set(ampere) == {"fp32", "dram"}
    ada = parse_exposition(page("NVIDIA L4"))[A].pipes()
    assert set(ada) == {"fp32", "fp64", "dram"}  # no DFMA pipe there


def test_split_tensor_pipes_are_counted_in() -> None:
    split = "".join(
        f'# TYPE {name} gauge\n{name}{{gpu="0",UUID="{A}",modelName="NVIDIA A100"}} {value}\n'
        for name, value in (
            ("DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE", 0.3),
            ("DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE", 0.05),
            ("DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE", 0.04),
            ("DCGM_FI_PROF_PIPE_INT_ACTIVE", 0.2),
        )
    )
    pipes = parse_exposition(page("NVIDIA A100-SXM4-80GB", split))[A].pipes()
    assert pipes == pytest.approx(
        {"fp16": 0.32, "fp32": 0.25, "fp64": 0.05, "int8": 0.05, "integer": 0.2, "dram": 0.3}
    )


def test_lines_of_mig_instances_are_not_the_gpus() -> None:
    assert parse_exposition(page("NVIDIA A100"))[B].dram_bw_util == 0.5


def test_an_unreachable_exporter_raises_an_error_that_names_it() -> None:
    with pytest.raises(DevicesError, match="dcgm-exporter does not answer"):
        DcgmScrape("http://127.0.0.1:9/metrics").read([A])
    with pytest.raises(ValueError, match="http://"):
        DcgmScrape("file:///etc/passwd")
