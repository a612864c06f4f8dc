"""In a step that isn't logged the host reads nothing of the device, from its inputs to its update."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from mindspeed_mm import accelerator
from mindspeed_mm.data.loading.counting import BatchCounts
from mindspeed_mm.models.common.expert_load import RoutedTokens
from mindspeed_mm.models.generation.parts import FrozenImageEncoder
from tests.distributed.test_devices import Pairs, run_on_the_host
from tests.support.families import families
from tests.support.family_case import FamilyCase
from tests.support.host_reads import DEVICE, HostRead, HostReads, counted_host_reads
from tests.support.launch import launch_flags
from tests.support.tiny_steps import Micro, TinySteps, forward_step
from tests.support.workers import RankPool

#: what is not ours: the end of a file's path → what it does there
ALLOWED = {
    "torch/optim/adam.py": "takes the scale and the flag to where the parameters are, which is where they are already",
}
PLANTED: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "cpu": lambda x: x.cpu(),
    "to": lambda x: x.to("cpu"),
    "__array__": lambda x: np.asarray(x),
    "__bool__": lambda x: bool(x[0] > 0),
    "__int__": lambda x: int(x.sum()),
    "__float__": lambda x: float(x.max()),
    "__index__": lambda x: [1, 2][x[1].long()],
    "__format__": lambda x: f"{x[0]}",
    "_local_scalar_dense": lambda x: torch.arange(x[1].long()),
    "nonzero": lambda x: x.nonzero(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "equal": lambda x: torch.equal(x, x),
    "index": lambda x: x[x > 0],
    "index_put": lambda x: x.__setitem__(x > 0, x[:1]),
    "repeat_interleave": lambda x: x.repeat_interleave(x.long()),
    "masked_scatter_backward": lambda x: x.clone().masked_scatter(x > 0, x.clone().requires_grad_()).sum().backward(),
}
#: host memory → what waits until it has been copied to the device
WAITING: dict[str, Callable[[torch.Tensor], Any]] = {
    "to": lambda x: x.to(DEVICE),
    "tensor": lambda x: torch.tensor([1.0], device=DEVICE),
}


@pytest.mark.parametrize("kind", PLANTED)
def test_each_kind_of_read_is_found_once(kind: str) -> None:
    """And none of the same values in host memory."""
    reads = HostReads()
    reads.open()
    host = torch.tensor([0.0, 1.0])
    with reads.seen():
        PLANTED[kind](host)
        assert reads.windows == [[]]
        PLANTED[kind](host.to(DEVICE, non_blocking=True) * 1)
    (found,) = reads.windows[0]
    assert found.file == __file__ or kind.endswith("backward")
    assert kind.strip("_") in found.kind


@pytest.mark.parametrize("kind", WAITING)
def test_a_copy_to_the_device_that_is_waited_for_is_found(kind: str) -> None:
    reads = HostReads()
    reads.open()
    with reads.seen():
        WAITING[kind](torch.ones(1))
        torch.ones(1).to(DEVICE, non_blocking=True)
    assert [read.kind for read in reads.windows[0]] == [f"{kind} device"]


def test_a_copy_is_read_one_step_late() -> None:
    """At once it is a read of the device like any other."""
    with counted_host_reads() as reads:
        device = accelerator.current()
        reads.open()
        values = torch.ones(2, device=device.device())
        at_once, late = device.read_later(values), device.read_later(values)
        at_once()
        assert [read.kind for read in reads.windows[0]] == ["tolist"]
        reads.open()
        late()
        assert reads.windows[1] == []


def test_first_frames_are_processed_where_they_are() -> None:
    """For an image encoder's processor, which needs them on the host: those of the device alone are read."""
    config = CLIPVisionConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.image_size, config.patch_size = 16, 8
    sizes = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    encoder = FrozenImageEncoder(CLIPVisionModel(config), CLIPImageProcessor(**sizes))
    frames, states, kinds = torch.rand(2, 3, 16, 16) * 2 - 1, [], []
    with counted_host_reads() as reads:
        for is_known in (True, False):
            reads.open()
            encoder.expect(frames if is_known else None)
            states.append(encoder.last_hidden_state(frames.to(DEVICE, non_blocking=True)))
            kinds.append([read.kind for read in reads.windows[-1]])
    assert kinds[0] == [] and kinds[1][0] == "to" and torch.equal(*states)


def host_reads_of_steps(kind: str, flags: dict[str, Any]) -> list[list[HostRead]]:
    """Reads of three steps of two micro-batches each, none of them logged."""
    with counted_host_reads() as reads:
        tiny = TinySteps(kind, clip_grad=1.0, **flags)
        for factor in (1.0, float("nan"), 2.0):
            routed = RoutedTokens(torch.ones(4, device=DEVICE))
            first = {"a": torch.tensor(1.0), "experts": routed}
            micros = [Micro(factor=factor, metrics=first), Micro(metrics={"b": (2.0, 1)})]
            tiny.backend.forward_backward(forward_step, iter(micros), 2)
            tiny.backend.step(BatchCounts(rows=2, media={"image": 1}), False)
    return reads.windows


STEPS: dict[str, dict[str, Any]] = {"adam": {}, "sgd": {"optimizer": "sgd", "sgd_momentum": 0.9}}
STEPS |= {"fp16": {"fp16": True, "loss_scale": 8.0}, "averages": {"ema_decay": 0.9}}


def not_allowed(windows: list[list[HostRead]]) -> list[HostRead]:
    return [read for window in windows for read in window if not read.file.endswith(tuple(ALLOWED))]


@pytest.mark.parametrize("settings", STEPS)
@pytest.mark.parametrize("kind", ["fsdp2", "ptd"])
def test_steps(ranks2: RankPool, megatron_pools: dict[int, RankPool], kind: str, settings: str) -> None:
    pool = {"fsdp2": ranks2, "ptd": megatron_pools[2]}[kind]
    for windows in pool.run(host_reads_of_steps, kind, STEPS[settings]):
        assert len(windows) == 3 and not_allowed(windows) == []


#: four steps, of which the last one alone is logged, and one save at the end
RUN = ["--train-iters", "4", "--log-interval", "4", "--save-interval", "100"]
#: what saves memory reads nothing either
SPARING = ["--swap-attention", "--chunk-mlp-tokens", "16"]


def host_reads_of_a_run(words: list[str], script: str) -> list[list[HostRead]]:
    with counted_host_reads() as reads:
        run_on_the_host([*words, *RUN], script)
    return reads.windows


@pytest.mark.parametrize("name", ["language", "megatron", "generation"])
def test_runs(name: str, qwen2_5_vl_dir: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of rows with and without images on both backends, and of clips, from the loader to the loop's own figures."""
    words, script = getattr(Pairs(tmp_path, qwen2_5_vl_dir, request), name)(tmp_path)
    pool = request.getfixturevalue("megatron_pools")[2] if name == "megatron" else request.getfixturevalue("ranks2")
    for windows in pool.run(host_reads_of_a_run, [*words(tmp_path / "saved"), *SPARING], script, timeout=120):
        assert len(windows) == 4
        assert not_allowed(windows[1:-1]) == []  # a model's outputs are checked in the first step, which is logged


def listed_reads() -> dict[str, set[str]]:
    """Family → where its libraries read the device, by the table of docs/performance.md."""
    text = (Path(__file__).parents[2] / "docs/performance.md").read_text(encoding="utf-8")
    table = text.partition("| families | read by their libraries |\n|---|---|\n")[2].partition("\n\n")[0]
    found = {}
    for line in table.splitlines():
        names, places = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in names.split(", "):
            found[name.strip("`")] = {place.strip("`") for place in places.split(", ")} - {"none"}
    return found


def place_of(read: HostRead) -> str:
    """The file and the function that reads, or the operator whose gradient does."""
    if read.file.endswith("torch/autograd/graph.py"):
        return f"gradient of {read.kind.removesuffix('_backward')}"
    return f"{Path(read.file).stem.removeprefix('modeling_')}.{read.function}"


# the rest by name (pytest -m full)
ALWAYS = ("qwen3_vl",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ALWAYS else [pytest.mark.full]) for name in families()]
)
def test_libraries_read_what_the_table_says(name: str, ranks1: RankPool, tmp_path: Path) -> None:
    """Of rows of all media and of none, padded and packed: nothing but that, and all of it."""
    case, found = FamilyCase(name, tmp_path, families()[name]), set()
    for is_packed in (False, True) if case.family.packs else (False,):
        data = json.loads(case.files["data.json"].read_text())
        data["dataset_param"]["basic_parameters"]["packing"] = is_packed
        (tmp_path / "data.json").write_text(json.dumps(data))
        length = 2 * max(len(sample["input_ids"]) for sample in case.samples)
        settings = {"micro_batch_size": 1 if is_packed else 2, "global_batch_size": 2 if is_packed else 8}
        settings |= {"mm_data": tmp_path / "data.json", "seq_length": length, "no_save_optim": True}
        words = launch_flags(case.files, **{**case.family.flags, **settings, "save": tmp_path / f"run{is_packed}"})
        [windows] = ranks1.run(host_reads_of_a_run, words, "pretrain_transformers.py", timeout=180)
        found |= {place_of(read) for read in not_allowed(windows[1:-1])}
    assert found == listed_reads()[name]
