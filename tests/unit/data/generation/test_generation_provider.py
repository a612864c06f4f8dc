"""From data.json and flags to batches of real clips: ranks, workers, validation, a resume."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mindspeed_mm.configs.generation_data import GenerationDataConfig
from mindspeed_mm.configs.run import Run
from mindspeed_mm.data.generation.providers import generation_data_provider
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.utils.errors import ConfigError
from tests.support.clips import write_clip
from tests.support.runs import run_of
from tests.unit.data.generation.generation_maker import RULE, described, write_rows


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve rows: wide and tall clips, short ones, a picture, and one that is missing."""
    folder = tmp_path_factory.mktemp("provided")
    write_clip(folder / "wide.mp4", frames=20, size=(64, 32))
    write_clip(folder / "tall.mp4", frames=20, size=(32, 64))
    write_clip(folder / "short.mp4", frames=6, size=(64, 32))
    Image.new("RGB", (64, 32), "green").save(folder / "a.png")
    names = ["wide.mp4", "tall.mp4", "short.mp4", "wide.mp4", "tall.mp4", "a.png", "gone.mp4"]
    rows = [{"path": names[number % 7], "cap": f"caption {number}"} for number in range(21)]
    return write_rows(folder / "rows.json", rows)


def run(data: Path, workers: int = 0, micro: int = 1, size: int = 1, flags: Any = None, **keys: Any) -> Run:
    buckets = [[9, 32, 64], [9, 64, 32], [5, 32, 64], [1, 32, 64]]
    loader = {"drop_last": False, "sampler_type": "LengthGroupedSampler"}
    content = described(data, buckets=buckets, loader=loader, basic_data_folder=str(data.parent), **keys)
    content["dataset_param"]["tokenizer_config"] = [{"from_pretrained": "one"}, {"model_max_length": 3}]
    sizes = {"micro_batch_size": micro, "global_batch_size": 4, "num_workers": workers, "seed": 11}
    typed = GenerationDataConfig.from_dict(content)
    return run_of(world_size=size, data=typed, use_torch_fsdp2=True, **{**sizes, **(flags or {})})


def provided(given: Run, start: DataStart) -> Any:
    assert isinstance(given.data, GenerationDataConfig)
    return generation_data_provider(given, start, given.data, RULE)


def steps(given: Run, count: int, rank: int = 0, consumed: int = 0) -> list[dict[int, torch.Tensor]]:
    """Key → clip of each optimizer step's real samples, of one rank."""
    train, _, _ = provided(given, DataStart(rank, given.batch.data_parallel_size, consumed))
    per_step = given.batch.num_microbatches
    batches = list(itertools.islice(iter(train), count * per_step))
    train.close()
    found = []
    for first in range(0, len(batches), per_step):
        step: dict[int, torch.Tensor] = {}
        for batch in batches[first : first + per_step]:
            real = batch["row_ids"] >= 0
            step.update(zip(batch["sample_keys"][real].tolist(), batch["video"][real], strict=True))
        found.append(step)
    return found


def test_the_same_clips_for_any_ranks_workers_and_micro_batches(data: Path) -> None:
    alone = steps(run(data), 7)
    assert sum(len(step) for step in alone[:6]) == 18  # of 21 rows, 3 are missing
    ranks = [steps(run(data, workers=1, micro=2, size=2), 7, rank) for rank in (0, 1)]
    later = steps(run(data, micro=4), 3, consumed=16)
    for number, step in enumerate(alone):
        together = {**ranks[0][number], **ranks[1][number]}
        assert together.keys() == step.keys()
        assert all(torch.equal(together[key], clip) for key, clip in step.items())
        if number >= 4:
            assert later[number - 4].keys() == step.keys()
    assert len({clip.shape for step in alone for clip in step.values()}) >= 3


def test_validation_rows(data: Path) -> None:
    train, valid, _ = provided(run(data, basic_val_rate=0.2), DataStart())
    assert (train.num_rows, valid.num_rows) == (17, 4)
    passes = [list(itertools.islice(iter(valid), 4)) for _ in range(2)]
    keys = [torch.cat([batch["sample_keys"] for batch in batches]).tolist() for batches in passes]
    assert keys[0] == keys[1]
    assert all(torch.equal(one["video"], other["video"]) for one, other in zip(*passes, strict=True))
    other = run(data, basic_val_data_path=str(data))
    assert provided(other, DataStart())[1].num_rows == 21
    assert provided(run(data), DataStart())[1] is None


def test_flags_that_do_nothing_here(data: Path, said: list[str]) -> None:
    provided(run(data, flags={"use_data_balance": True}), DataStart())
    assert any("--use-data-balance has no effect here" in line for line in said)
    packed = run(data, flags={"use_txt_dynamic_batching": True})
    with pytest.raises(ConfigError, match="--use-txt-dynamic-batching: clips aren't packed"):
        provided(packed, DataStart())


def test_directories_of_tokenizers(data: Path) -> None:
    assert run(data).data.dataset_param.tokenizer_dirs == ["one", None]  # type: ignore[union-attr]
