"""The extraction of features, killed at any moment."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from mindspeed_mm.data.generation.feature_files import FeatureReader
from mindspeed_mm.tools.feature_extraction.extract import Extraction
from tests.support.workers import RankPool
from tests.unit.tools.test_feature_extraction import ROWS, Clips, Encoder, rows_in

KILLS = 8


def extract(folder: str, rank: int, ranks: int) -> None:
    """Extract one rank's share; every sample is a shard of its own."""
    made_from = {"of": "numbers"}
    clips, encoder = Clips(), Encoder()
    Extraction(clips, encoder, folder, made_from, rank=rank, world_size=ranks, batch_size=2, shard_bytes=1).run()  # type: ignore[arg-type]


def in_a_child(folder: str, rank: int, ranks: int, kill_at: int | None) -> int:
    """Extract in a process that is killed just before its n-th change of the disk; returns how it ended."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    left = [kill_at]

    def counted(change: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] is not None:
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left[0] -= 1
            return change(*args, **kwargs)

        return call

    os.replace, os.fsync = counted(os.replace), counted(os.fsync)
    try:
        extract(folder, rank, ranks)
    except BaseException:
        os._exit(1)
    os._exit(0)


def kill_and_go_on(folder: str) -> int:
    """Kill the extraction at each of its changes of the disk, once in a folder of its own; go on with more ranks."""
    import rich.progress  # noqa: F401  (once, not in every child)
    import safetensors.torch  # noqa: F401

    killed = 0
    for number in range(KILLS):
        place = f"{folder}/{number}"
        killed += in_a_child(place, 0, 1, kill_at=3 * number) == signal.SIGKILL
        if number % 3 == 0:  # a line that was being written
            for index in Path(place).glob("index-0.jsonl"):
                index.write_bytes(index.read_bytes() + b'{"row": 99, "fi')
        killed += in_a_child(place, 0, 2, kill_at=number) == signal.SIGKILL
        for rank in (1, 0):
            assert in_a_child(place, rank, 2, kill_at=None) == 0
    return killed


def test_a_killed_extraction_goes_on_where_it_was(tmp_path: Path, ranks1: RankPool) -> None:
    (killed,) = ranks1.run(kill_and_go_on, str(tmp_path))
    assert killed >= KILLS
    for folder in sorted(tmp_path.iterdir()):
        assert rows_in(folder) == list(range(ROWS)), folder
        reader = FeatureReader([folder])
        for row in range(ROWS):
            sample = reader.read(row)
            assert sample["latents"].unique().tolist() == [row]
            assert sample["cond.twice"].unique().tolist() == [2 * row]
            assert sample["text.states"].tolist() == [5, 5, 5]
        assert reader.empty()["text.states"].tolist() == [0, 0, 0]
        named = {json.loads(line)["file"] for f in folder.glob("index-*.jsonl") for line in f.read_text().splitlines()}
        assert {file.name for file in folder.glob("*features-*.safetensors*")} == named  # nothing is left lying about
