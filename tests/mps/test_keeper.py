"""The keeper's status file when the disk does not take it."""

import dataclasses
import json

from gpushare.mps import keeper as keeping
from gpushare.mps.layout import GpuDirectory, status_reader
from gpushare.twin.gpus import parse_simulated


async def test_a_full_disk_is_said_once_and_the_status_follows_when_there_is_room(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    [info] = parse_simulated("H200:1", "n")
    gpu = GpuDirectory.of(tmp_path, info.uuid)
    gpu.create()
    kept = keeping.Keeper(gpu, keeping.setup_of(gpu, json.dumps(dataclasses.asdict(info))))
    kept.publish()
    before = gpu.status.read_bytes()
    with monkeypatch.context() as broken:

        def full(*_):
            raise OSError(28, "No space left on device")

        broken.setattr(keeping, "write_status", full)
        for _ in range(5):
            kept.publish()
    assert gpu.status.read_bytes() == before, "a reader sees the old word, and takes it for silence soon"
    kept.publish()
    assert status_reader(gpu).read().written_at > json.loads(before)["written_at"]
    said = [record.getMessage() for record in caplog.records]
    assert len([line for line in said if "No space left" in line]) == 1
    assert len([line for line in said if "written again" in line]) == 1
