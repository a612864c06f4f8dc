"""Prefetching of micro-batches: how many are taken from the data, and when encoders are on the device."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mindspeed_mm.data.loading.counting import CountingIterator
from mindspeed_mm.models.generation import sample_encoder as sora_encode
from mindspeed_mm.models.generation.prefetch import PrefetchEncoder
from mindspeed_mm.utils.log import forget_notices


class Encoder:
    """Records when it was loaded and offloaded."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def load(self) -> None:
        self.calls.append("load")

    def offload(self) -> None:
        self.calls.append("offload")


def numbered() -> Iterator[dict[str, Any]]:
    number = 0
    while True:
        yield {"number": number, "num_rows": 1, "rows_left_out": 0}
        number += 1


def prefetching(interval: int, micro_batches: int) -> tuple[PrefetchEncoder, Encoder]:
    encoder = Encoder()

    def prepare(batch: dict[str, Any]) -> dict[str, Any]:
        assert set(batch) == {"number"}  # what no model takes has been taken out
        encoder.calls.append(str(batch["number"]))
        return batch

    return PrefetchEncoder(prepare, encoder, interval, micro_batches), encoder  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("interval", "expected"),
    [
        (1, "0 1 2 3 4 5"),
        (2, "load 0 1 offload load 2 offload load 3 4 offload load 5 offload"),
        (3, "load 0 1 2 offload load 3 4 5 offload"),
        (8, "load 0 1 2 offload load 3 4 5 offload"),
    ],
)
def test_a_step_is_never_left(interval, expected):
    batches, encoder = prefetching(interval, 3)
    source = CountingIterator(numbered(), micro_batch_size=1)
    for step in range(2):
        numbers = [batches.next_batch(source)["number"] for _ in range(3)]
        assert numbers == [3 * step, 3 * step + 1, 3 * step + 2]
        assert source.take().rows == 3  # what was counted belongs to this step
    assert " ".join(encoder.calls) == expected


def test_an_evaluation_has_its_own_batches():
    batches, _ = prefetching(4, 2)
    training = numbered()
    assert [batches.next_batch(training)["number"] for _ in range(2)] == [0, 1]
    for _ in range(2):
        evaluation = numbered()
        assert [batches.next_batch(evaluation)["number"] for _ in range(3)] == [0, 1, 2]  # and no more
    assert [batches.next_batch(training)["number"] for _ in range(2)] == [2, 3]
    assert next(training)["number"] == 4


def test_an_interval_longer_than_a_step_is_reported_once(caplog):
    forget_notices()
    batches, _ = prefetching(8, 2)
    source = numbered()
    for _ in range(4):
        batches.next_batch(source)
    reported = [record.getMessage() for record in caplog.records if "encoder_offload_interval" in record.getMessage()]
    assert len(reported) == 1
    assert "is 8" in reported[0] and "2 micro-batch(es)" in reported[0]


@pytest.mark.parametrize("device", ["an accelerator", "cpu"])
def test_what_is_offloaded_is_still_on_the_host(monkeypatch, device):
    model = torch.nn.BatchNorm1d(3)  # parameters and buffers
    before = {name: value.clone() for name, value in model.state_dict().items()}
    on_host = {name: value.data_ptr() for name, value in model.state_dict().items()}
    fake = SimpleNamespace(is_host=device == "cpu", device=lambda: torch.device("cpu"))
    monkeypatch.setattr(sora_encode.accelerator, "current", lambda: fake)
    monkeypatch.setattr(sora_encode, "open_parts", lambda *_, **__: SimpleNamespace(modules=lambda: [model]))
    encoder = sora_encode.SampleEncoder(None, None, stays=False)  # type: ignore[arg-type]
    for _ in range(2):
        encoder.load()
        moved = [name for name, value in model.state_dict().items() if value.data_ptr() != on_host[name]]
        assert moved == ([] if device == "cpu" else list(before))
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        encoder.offload()
        assert {name: value.data_ptr() for name, value in model.state_dict().items()} == on_host
