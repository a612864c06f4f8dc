"""Weights from a HF directory into a model sharded over 2 ranks: time and peak anonymous memory.

    OMP_NUM_THREADS=1 python benchmarks/load_weights.py [--rounds 5] [--folder DIR]

Contenders: `from_pretrained` on every rank, then fully_shard; transformers' own sharded load (`distributed_config`);
ours (structure on meta, fully_shard, each rank reads its part). Each measurement has fresh processes, which have paid
before what a process pays once, whatever loads: imports, and transformers' table of conversions of all its models
(0.4 s): every contender loads a model of a few kB first, its own way. Models: a dense Qwen3 of 305 M parameters, a
Qwen3-MoE of 285 M with 32 experts a layer (one file tensor an expert in the hub's layout, stacked in the model);
float32, and the dense one from bfloat16 files. The directories are made once and are in the page cache. Memory is the
highest RssAnon above that before loading, the larger of the ranks: pages of mapped files are not in it.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
import os
import shutil
import socket
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).parent)]

RANKS = 2
CONTENDERS = ("whole", "transformers", "ours")


def make_models(folder: Path, smallest: bool = False) -> dict[str, Path]:
    """Write the HF directories, with random weights; the smallest are of a few MB and float32."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    common = {"num_key_value_heads": 8, "vocab_size": 32000, "tie_word_embeddings": False, "head_dim": 64}
    layers, width = (2, 8) if smallest else (19, 1)
    dense = Qwen3Config(
        hidden_size=1024 // width,
        intermediate_size=3072 // width,
        num_hidden_layers=layers,
        num_attention_heads=16,
        **common,
    )
    moe = Qwen3MoeConfig(
        hidden_size=512 // width,
        intermediate_size=1024 // width,
        moe_intermediate_size=620 // width,
        num_hidden_layers=min(8, layers),
        num_attention_heads=8,
        num_experts=32,
        num_experts_per_tok=4,
        **common,
    )
    small = {
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "head_dim": 8,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    for name, model_class, config in (
        ("warm_dense", Qwen3ForCausalLM, Qwen3Config(hidden_size=16, intermediate_size=16, **small)),
        (
            "warm_MoE",
            Qwen3MoeForCausalLM,
            Qwen3MoeConfig(hidden_size=16, moe_intermediate_size=16, num_experts=4, **small),
        ),
    ):
        model_class(config).save_pretrained(folder / name)
    made = {}
    for name, model_class, config, dtype in (
        ("dense fp32", Qwen3ForCausalLM, dense, torch.float32),
        ("MoE fp32", Qwen3MoeForCausalLM, moe, torch.float32),
        ("dense bf16", Qwen3ForCausalLM, dense, torch.bfloat16),
    )[: 2 if smallest else 3]:
        path = made[name] = folder / name.replace(" ", "_")
        if not (path / "config.json").exists():
            torch.manual_seed(0)
            model = model_class(config).to(dtype)
            model.save_pretrained(path, max_shard_size="300MB")
            print(f"{name}: {sum(p.numel() for p in model.parameters()) / 1e6:.0f} M parameters", flush=True)
    return made


class PeakAnonymous:
    """Samples RssAnon of this process."""

    def __enter__(self) -> PeakAnonymous:
        self.before = self.peak = self._read()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    @property
    def added(self) -> float:
        """MB above the start."""
        return (self.peak - self.before) / 1e3

    def _sample(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self._read())

    @staticmethod
    def _read() -> int:
        with open("/proc/self/status") as f:
            return next(int(line.split()[1]) for line in f if line.startswith("RssAnon"))


def load(contender: str, path: str) -> Any:
    """Load by one of the ways; returns the sharded model."""
    import transformers
    from torch.distributed.fsdp import fully_shard
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    model_class = getattr(transformers, config.architectures[0])
    if contender == "transformers":
        return model_class.from_pretrained(path, dtype=torch.float32, distributed_config={"fsdp_size": RANKS})
    if contender == "whole":
        model = model_class.from_pretrained(path, dtype=torch.float32)
        for layer in model.model.layers:
            fully_shard(layer)
        return fully_shard(model)
    from mindspeed_mm.checkpoint.sources import open_weights
    from mindspeed_mm.checkpoint.weights import load_weights
    from mindspeed_mm.models.transformers_model import TransformersModel

    with torch.device("meta"):
        model = TransformersModel({"init_from_hf_path": path})
    model.weights_come_later = True
    model.model.fsdp2_overrides = {"sub_modules_to_wrap": ["model.layers.{*}"], "sharding_size": "auto"}
    model.fully_shard()
    load_weights(model.model, open_weights(path))
    return model.model


def checksum(model: Any) -> float:
    """A figure that equal weights have in common; also touches every page."""
    total = 0.0
    for param in model.parameters():
        value = param.detach()
        local = value.to_local() if hasattr(value, "to_local") else value
        total += float(local.double().abs().sum())
    return total


def rank_main(rank: int, port: int, contender: str, path: str, results: Any) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(RANKS))
    os.environ["LOCAL_RANK"] = str(rank)
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.distributed.init_process_group("gloo")
    load(contender, str(Path(path).parent / f"warm_{Path(path).name.split('_')[0]}"))
    gc.collect()
    torch.distributed.barrier()
    with PeakAnonymous() as memory:
        start = time.perf_counter()
        model = load(contender, path)
        torch.distributed.barrier()
        seconds = time.perf_counter() - start
    results.put((seconds, memory.added, checksum(model)))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def measure(context: Any, contender: str, path: Path) -> tuple[float, float, float]:
    """Seconds, peak MB of the worse rank, checksum over all ranks."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    results = context.SimpleQueue()
    ranks = [context.Process(target=rank_main, args=(r, port, contender, str(path), results)) for r in range(RANKS)]
    for process in ranks:
        process.start()
    answers = [results.get() for _ in ranks]
    for process in ranks:
        process.join()
    return max(a[0] for a in answers), max(a[1] for a in answers), sum(a[2] for a in answers)


def main() -> None:
    """Measure all and print a table."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the models are kept; without it, made anew and removed")
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.rounds = 1
    folder = options.folder or Path(tempfile.mkdtemp(prefix="load-weights-"))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.fsdp", "transformers", "transformers.modeling_utils"])
    try:
        models = make_models(folder, options.smallest)
        print(f"{'model':<12}{'contender':<14}{'seconds':>9}{'peak MB':>9}   ÷ whole (time, memory)")
        for name, path in models.items():
            found: dict[str, list[tuple[float, float, float]]] = {c: [] for c in CONTENDERS}
            for _ in range(options.rounds):
                for contender in CONTENDERS:
                    found[contender].append(measure(context, contender, path))
            assert len({round(r[2], 3) for rs in found.values() for r in rs}) == 1, "the contenders' weights differ"
            middle = {c: [statistics.median(r[i] for r in rs) for i in range(2)] for c, rs in found.items()}
            for contender, (seconds, memory) in middle.items():
                ratios = [a / b for a, b in zip((seconds, memory), middle["whole"])]
                print(f"{name:<12}{contender:<14}{seconds:>9.2f}{memory:>9.0f}   {ratios[0]:.2f}, {ratios[1]:.2f}")
            ours, theirs = middle["ours"], middle["transformers"]
            ratios = [a / max(b, 1e-3) for a, b in zip(ours, theirs)]
            print(f"{name:<12}ours ÷ transformers' sharded load: {ratios[0]:.2f}, {ratios[1]:.2f}", flush=True)
    finally:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
