"""Users' own models and scripts: classes with the mixins, overridden steps, and every form of the five callbacks.

Scripts are written as files and run in the workers through `pretrain`, as a launcher runs them; what they train is
compared with a plain loop over the same rows.
"""

from __future__ import annotations

import json
import logging
import runpy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import logger
from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.workers import RankPool, run_ranks


@contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


# --- models


class Net(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    """A user's model as seed 001 writes one: nothing but the mixins."""

    def __init__(self) -> None:
        super().__init__({"width": 8})
        self.embed = nn.Embedding(10, 8, padding_idx=0)
        self.norm = nn.LayerNorm(8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(ids))
        for layer in self.layers:
            x = torch.relu(layer(x))
        return self.head(x)


class OwnSharding(Net):
    """Overrides the middle step as seed 001 does; the helpers are called without arguments."""

    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        self.asked = (fsdp2_kwargs, fsdp2_config)
        self.set_recompute_modules_to_wrap()
        self.set_fullyshard_modules_to_wrap()
        num_to_forward_prefetch = getattr(self.fsdp2_config, "num_to_forward_prefetch", 0)
        assert num_to_forward_prefetch == 0
        self.set_modules_to_prefetch(2, 2)


class OwnUnits(Net):
    """Names its modules in code; the file only has the basics."""

    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        self.set_recompute_modules_to_wrap(self, ["layers.{1}"], False)
        self.set_fullyshard_modules_to_wrap(self, ["layers.{0-2}"], **fsdp2_kwargs)
        self.set_modules_to_prefetch(1, 0)


class Steps(Net):
    """Notes the order of the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[str] = []

    def _pre_fully_shard(self, process_group: Any, fsdp2_config_path: Any) -> Any:
        self.steps.append("pre")
        return super()._pre_fully_shard(process_group, fsdp2_config_path)

    def _fully_shard(self, fsdp2_kwargs: Any = None, fsdp2_config: Any = None) -> None:
        self.steps.append(f"middle {sorted(fsdp2_kwargs)} {type(fsdp2_config).__name__}")
        super()._fully_shard(fsdp2_kwargs, fsdp2_config)

    def _post_fully_shard(self) -> None:
        self.steps.append("post")
        super()._post_fully_shard()


def write_yaml(folder: Path, **content: Any) -> str:
    path = folder / "fsdp2.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def shard_by_hand(path: str, kind: type[Net]) -> dict[str, Any]:
    """Call `fully_shard` as a foreign framework does: keywords, a process group of its own, a path."""
    model = kind()
    calls: list[int] = []
    for layer in model.layers:
        layer.forward = _counting(layer.forward, calls)  # type: ignore[method-assign]
    group = dist.new_group(list(range(dist.get_world_size())))
    answer = model.fully_shard(process_group=group, fsdp2_config_path=path)
    with (
        mock.patch.object(FSDPModule, "set_modules_to_forward_prefetch") as ahead,
        mock.patch.object(FSDPModule, "set_modules_to_backward_prefetch") as behind,
    ):
        model(torch.arange(10)).sum().backward()
    return {
        "answer": answer,
        "units": [name for name, module in model.named_modules() if isinstance(module, FSDPModule)],
        "config": model.fsdp2_config,
        "runs": len(calls),
        "ahead": max((len(call.args[0]) for call in ahead.call_args_list), default=0),
        "behind": max((len(call.args[0]) for call in behind.call_args_list), default=0),
        "local": tuple(model.embed.weight.to_local().shape),
        "same": model.head.weight is model.embed.weight,
        "asked": getattr(model, "asked", None) is not None and sorted(model.asked[0]),
        "steps": getattr(model, "steps", None),
    }


def _counting(forward: Callable[..., Any], calls: list[int]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        calls.append(1)
        return forward(*args)

    return run


def test_a_foreign_caller_and_overridden_steps(ranks2: RankPool, tmp_path: Path) -> None:
    """Helpers without arguments follow the file; with arguments they follow these; `fully_shard` returns True."""
    everything = {"sharding_size": "auto", "sub_modules_to_wrap": ["layers.{*}"], "recompute_modules": ["layers.{*}"]}
    path = write_yaml(tmp_path, **everything, num_to_backward_prefetch=0)
    every_layer = ["", "layers.0", "layers.1", "layers.2", "layers.3"]

    plain = ranks2.run(shard_by_hand, path, Net)[0]
    assert plain["answer"] is True and plain["same"] and plain["local"] == (5, 8)
    assert (plain["units"], plain["runs"], plain["ahead"], plain["behind"]) == (every_layer, 8, 0, 0)

    own = ranks2.run(shard_by_hand, path, OwnSharding)[0]
    assert own["answer"] is True and isinstance(own["config"], Fsdp2Config)
    assert (own["units"], own["runs"], own["ahead"], own["behind"]) == (every_layer, 8, 2, 2)
    assert "mesh" in own["asked"] and "mp_policy" in own["asked"]

    pre, middle, post = ranks2.run(shard_by_hand, path, Steps)[0]["steps"]
    assert (pre, post) == ("pre", "post")
    assert middle.startswith("middle ['ignored_params', 'mesh', 'mp_policy', 'offload_policy'")
    assert middle.endswith(" Fsdp2Config")

    in_code = ranks2.run(shard_by_hand, write_yaml(tmp_path, sharding_size="auto"), OwnUnits)[0]
    assert (in_code["units"], in_code["runs"]) == (["", "layers.0", "layers.1", "layers.2"], 5)
    assert (in_code["ahead"], in_code["local"]) == (1, (5, 8))


def values_from_meta(path: str, seed: int) -> dict[str, torch.Tensor]:
    """Build on meta, shard, and return whole tensors."""
    with torch.device("meta"):
        model = Net()
    with build_context(BuildContext(seed=seed)):
        model.fully_shard(fsdp2_config_path=path)
    assert model.head.weight is model.embed.weight
    params = dict(model.named_parameters())
    return {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone() for n, p in params.items()}


def test_a_model_of_ones_own_from_meta(ranks2: RankPool, ranks4: RankPool, tmp_path: Path) -> None:
    """Values depend on seed and name, not on ranks, shards or units; every rank has the same."""
    whole = run_ranks(_alone, 1, write_yaml(tmp_path, sharding_size=1))[0]
    layers = ["layers.{*}"]
    for pool, content in (
        (ranks2, {"sharding_size": "auto", "sub_modules_to_wrap": layers}),
        (ranks2, {"sharding_size": 1}),
        (ranks4, {"sharding_size": 2, "sub_modules_to_wrap": layers, "ignored_modules": ["norm"]}),
    ):
        for found in pool.run(values_from_meta, write_yaml(tmp_path, **content), 7):
            assert found.keys() == whole.keys()
            assert all(torch.equal(found[n], v) for n, v in whole.items())
    other = ranks2.run(values_from_meta, write_yaml(tmp_path, sharding_size=2), 8)[0]
    assert not torch.equal(other["layers.0.weight"], whole["layers.0.weight"])
    assert not torch.equal(whole["layers.0.weight"], whole["layers.1.weight"])
    assert whole["embed.weight"][1:].std() == pytest.approx(0.02, rel=0.3) and not whole["embed.weight"][0].any()
    assert (whole["norm.weight"] == 1).all() and not whole["layers.0.bias"].any()


def _alone(path: str) -> dict[str, torch.Tensor]:
    dist.init_process_group("gloo")
    return values_from_meta(path, 7)


class WithTable(Net):
    """Has a buffer that its constructor computes."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(8.0), persistent=False)


def table_from_meta(path: str) -> str:
    with torch.device("meta"):
        model = WithTable()
    try:
        model.fully_shard(fsdp2_config_path=path)
    except ConfigError as error:
        return str(error)
    return "right" if torch.equal(model.table, torch.arange(8.0)) else "junk"


def test_a_buffer_of_ones_own_from_meta(ranks2: RankPool, tmp_path: Path) -> None:
    """A buffer has its constructor's values after meta init, or an error names it; never junk."""
    found = ranks2.run(table_from_meta, write_yaml(tmp_path))[0]
    assert found == "right" or "table" in found


# --- scripts

SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, Subset

import mindspeed_mm
from megatron.training import get_args
from mindspeed_mm.models.common.module import MultiModalModule
from mindspeed_mm.models.transformers.base_model import FSDP2Mixin, WeightInitMixin
from mindspeed_mm.training import pretrain


class Rows(Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        x = torch.sin(torch.arange(4.0) * (index + 1))
        return {"x": x, "y": x.sum().reshape(1), "mask": (torch.arange(4) <= index % 4).float()}


class Stream(IterableDataset):
    def __iter__(self):
        args = get_args()
        yield from (Rows()[i] for i in range(args.data_parallel_rank, ROWS, args.data_parallel_size))


class CustomModel(MultiModalModule, FSDP2Mixin, WeightInitMixin):
    def __init__(self, config):
        super().__init__(config)
        self.first = nn.Linear(4, 8)
        self.second = nn.Linear(8, 4)
        self.dropout = nn.Dropout(DROPOUT)
        torch.manual_seed(0)
        self.init_weights()

    def forward(self, x, y, mask):
        return {"error": (self.second(self.dropout(torch.tanh(self.first(x)))) - y) ** 2, "mask": mask}


def model_provider(*args, **kwargs):
    return CustomModel(None)


def dataloader(shuffle=False):
    args = get_args()
    data = Rows()
    sampler = DistributedSampler(data, args.data_parallel_size, args.data_parallel_rank, shuffle=shuffle)
    return DataLoader(data, batch_size=args.micro_batch_size, sampler=sampler, drop_last=True)


GET_BATCH


def loss_func(output):
    error, mask = output["error"], output["mask"]
    LOSS


def forward_step(data_iterator, model):
    output = model(**get_batch(CALL))
    return output, loss_func


PROVIDER

if __name__ == "__main__":
    pretrain(PRETRAIN)
"""
GET_BATCH = {
    "with args": "def get_batch(data_iterator, args):\n    if data_iterator is None:\n        raise ValueError\n"
    "    return next(data_iterator)",
    "alone": "def get_batch(data_iterator):\n    return next(data_iterator)",
}
LOSS = {
    "tensor": "return error.mean()",
    "mean": 'return error.mean(), {"loss": error.mean(), "largest row": 3, "absolute": error.detach().sqrt().mean()}',
    "sum": 'return (error * mask).sum(), mask.sum(), {"targets": mask.sum()}',
    "sum, number": "return (error * mask).sum(), int(mask.sum()), {}",
}
PROVIDER = {
    "loaders": "def train_valid_test_datasets_provider():\n    return dataloader(), None, None",
    "loaders, counts": "def train_valid_test_datasets_provider(train_val_test_num_samples):\n"
    "    assert train_val_test_num_samples[0] == 8 * 3, train_val_test_num_samples\n"
    "    return dataloader(), dataloader(), dataloader()",
    "data sets": "def train_valid_test_datasets_provider():\n    return Rows(), None, None",
    "data sets, counts": "def train_valid_test_datasets_provider(train_val_test_num_samples):\n"
    "    assert len(train_val_test_num_samples) == 3\n    return Rows(), Subset(Rows(), range(5)), None",
    "one loader": "def train_valid_test_datasets_provider():\n    return dataloader()",
    "shuffled loader": "def train_valid_test_datasets_provider():\n    return dataloader(shuffle=True), None, None",
    "loader with an order of its own": "def train_valid_test_datasets_provider():\n"
    "    return DataLoader(Rows(), batch_size=get_args().micro_batch_size, shuffle=True), None, None",
    "stream": "def train_valid_test_datasets_provider():\n"
    "    return DataLoader(Stream(), batch_size=get_args().micro_batch_size), None, None",
}
PRETRAIN = {
    "keyword": "train_valid_test_datasets_provider, model_provider, forward_step_func=forward_step",
    "megatron": "train_valid_test_datasets_provider, model_provider, 'encoder_or_decoder', forward_step",
}


def write_script(
    folder: Path,
    loss: str = "tensor",
    provider: str = "loaders",
    get_batch: str = "alone",
    pretrain: str = "keyword",
    rows: int = 8,
    dropout: float = 0.0,
) -> str:
    text = SCRIPT.replace("GET_BATCH", GET_BATCH[get_batch]).replace("LOSS", LOSS[loss])
    text = text.replace("CALL", "data_iterator, get_args()" if get_batch == "with args" else "data_iterator")
    text = text.replace("PROVIDER", PROVIDER[provider]).replace("PRETRAIN", PRETRAIN[pretrain])
    path = folder / "pretrain_mine.py"
    path.write_text(text.replace("ROWS", str(rows)).replace("DROPOUT", str(dropout)))
    return str(path)


def script_flags(folder: Path, run: Path, **flags: Any) -> list[str]:
    """A launch without model.json and data.json."""
    write_yaml(folder, sharding_size="auto", sub_modules_to_wrap=["first", "second"])
    files = {name: folder / name for name in ("model.json", "data.json", "tools.json", "fsdp2.yaml")}
    settings = {"mm_model": None, "mm_data": None, "mm_tool": None, "micro_batch_size": 2, "global_batch_size": 8}
    return launch_flags(files, **{**settings, "train_iters": 3, "save": run, "clip_grad": 0.0, **flags})


def train_by_hand(
    script: str, loss: str, held_out: int = 8, change: Callable[[Any], Any] = lambda model: model
) -> tuple[list[float], list[float], float]:
    """Three steps over all rows at once, and after the second the loss of the first `held_out` rows.

    Args:
        change: the script's model → the model that is trained.
    """
    names = runpy.run_path(script, run_name="imported")
    model = change(names["CustomModel"](None))
    rows = [names["Rows"]()[i] for i in range(8)]
    batch = {key: torch.stack([row[key] for row in rows]) for key in rows[0]}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8)

    def loss_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        output = model(**batch)
        if loss.startswith("sum"):
            return (output["error"] * output["mask"]).sum() / output["mask"].sum()
        return output["error"].mean()

    losses, norms, evaluated = [], [], 0.0
    for step in range(3):
        if step == 2:
            evaluated = float(loss_of({key: value[:held_out] for key, value in batch.items()}).detach())
        value = loss_of(batch)
        optimizer.zero_grad()
        value.backward()
        losses.append(float(value.detach()))
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for p in trained])))
        optimizer.step()
    return losses, norms, evaluated


def test_adapters_in_a_model_of_ones_own(ranks2: RankPool, tmp_path: Path) -> None:
    """The LoRA flags alone insert adapters into a user's model: it trains as a peft loop does, and PEFT loads it."""
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict

    def with_adapters(model: Any) -> Any:
        torch.manual_seed(1)
        return get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["first"], init_lora_weights=False))

    script, run = write_script(tmp_path, "sum"), tmp_path / "run"
    model = with_adapters(runpy.run_path(script, run_name="imported")["CustomModel"](None))
    model.save_pretrained(tmp_path / "start")
    lora = {"lora_target_modules": "first", "lora_r": 2, "lora_alpha": 4, "lora_load": tmp_path / "start"}
    ranks2.run(run_entry, script_flags(tmp_path, run, **lora, save_hf=True), script)
    kept: list[Any] = []
    expected = train_by_hand(script, "sum", change=lambda model: kept.append(with_adapters(model)) or kept[0])
    losses, norms = metrics_of(run)
    assert losses == pytest.approx(expected[0], rel=1e-6)
    assert norms == pytest.approx(expected[1], rel=1e-5)
    plain = runpy.run_path(script, run_name="imported")["CustomModel"](None)
    loaded = get_peft_model_state_dict(PeftModel.from_pretrained(plain, run / "hf"))
    trained = get_peft_model_state_dict(kept[0])
    assert loaded.keys() == trained.keys()
    assert all(torch.allclose(loaded[name], value, rtol=1e-5, atol=1e-7) for name, value in trained.items())


@pytest.mark.parametrize(
    "loss, provider, get_batch, pretrain",
    [
        ("tensor", "loaders", "with args", "keyword"),
        ("mean", "loaders, counts", "alone", "megatron"),
        ("sum", "data sets", "alone", "keyword"),
        ("sum, number", "data sets, counts", "with args", "megatron"),
        ("sum", "one loader", "alone", "keyword"),
        ("mean", "data sets", "with args", "keyword"),
    ],
)
def test_forms_of_the_callbacks(
    ranks2: RankPool, tmp_path: Path, loss: str, provider: str, get_batch: str, pretrain: str
) -> None:
    """Every form trains (two micro-batches a step on each rank), and to what its loss means."""
    script, run = write_script(tmp_path, loss, provider, get_batch, pretrain), tmp_path / "run"
    more = {"eval_interval": 2, "eval_iters": 1} if "counts" in provider else {}
    ranks2.run(run_entry, script_flags(tmp_path, run, **more), script)
    losses, norms = metrics_of(run)
    expected_losses, expected_norms, evaluated = train_by_hand(script, loss, 5 if "data sets" in provider else 8)
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if loss == "mean":
        assert records[0]["largest row"] == 3
        assert records[0]["absolute"] > 0
    if loss == "sum":
        assert records[0]["targets"] == 20 / 4  # the mean over 4 micro-batches
    if more:
        evaluations = [r for r in records if "eval_loss" in r]
        assert [(r["iteration"], r["eval_batches"]) for r in evaluations] == [(2, 1), (3, 1)]
        assert evaluations[0]["eval_loss"] == pytest.approx(evaluated, rel=1e-6)


def run_and_listen(words: list[str], script: str) -> list[str]:
    with heard() as lines:
        run_entry(words, script)
    return lines


@pytest.mark.parametrize(
    "provider",
    [
        "shuffled loader",
        "loader with an order of its own",
        "stream",
    ],
)
def test_resume_of_data_without_a_position(ranks2: RankPool, tmp_path: Path, provider: str) -> None:
    """Consumed samples are skipped: the run goes on with the rows that an unbroken one would see, in either epoch."""
    script = write_script(tmp_path, "sum", provider, rows=24, dropout=0.1)
    settings = {"train_iters": 8, "global_batch_size": 8}
    ranks2.run(run_entry, script_flags(tmp_path, tmp_path / "whole", **settings), script)
    expected = metrics_of(tmp_path / "whole")
    parts = tmp_path / "parts"
    ranks2.run(run_entry, script_flags(tmp_path, parts, **settings, exit_interval=2), script)
    for stop in (4, 8):
        more = {"exit_interval": 4} if stop == 4 else {}
        lines = ranks2.run(run_and_listen, script_flags(tmp_path, parts, **settings, **more, load=parts), script)[0]
        skips = [line for line in lines if "micro-batches are read and skipped" in line]
        # what has indices is not read again: neither the 2 or 4 steps of 2 micro-batches nor whole epochs (of 6)
        assert len(skips) == (provider == "stream")
        assert all(f" {stop % 6} micro-batches" in line for line in skips)
    assert len(expected[0]) == 8
    assert metrics_of(parts) == expected
