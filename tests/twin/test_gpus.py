import pytest

from gpushare.twin.gpus import MODELS, SM_CLOCKS, gpu_uuid, parse_simulated


def test_a_list_of_models_becomes_gpus_by_index():
    gpus = parse_simulated("H200:1,A100-40GB:2", "node-a")
    assert [(g.index, g.memory_mib, g.sm_count) for g in gpus] == [
        (0, 143771, 132),
        (1, 40960, 108),
        (2, 40960, 108),
    ]
    assert gpus[0].model == "NVIDIA H200"


def test_uuids_are_the_same_each_time_and_differ_between_nodes_and_indexes():
    first, again = parse_simulated("H200:2", "a"), parse_simulated("H200:2", "a")
    assert first == again
    assert len({g.uuid for g in first} | {g.uuid for g in parse_simulated("H200:2", "b")}) == 4
    assert first[1].uuid == gpu_uuid("a", 1)


def test_one_gpu_without_a_count():
    assert len(parse_simulated("T4", "a")) == 1


@pytest.mark.parametrize("text", ["", "H300:1", "H200:0", "H200:x", "H200:65", "H200:-1", "H200:1,,T4", "h200:1"])
def test_what_is_not_a_list_of_models_is_refused_with_what_is_allowed(text):
    with pytest.raises(ValueError, match="allowed") as refused:
        parse_simulated(text, "a")
    assert "simulated GPUs" in str(refused.value)


def test_every_model_is_a_gpu():
    assert all(parse_simulated(name, "a")[0].memory_mib > 10_000 for name in MODELS)
    assert {product for product, _, _ in MODELS.values()} == SM_CLOCKS.keys()
