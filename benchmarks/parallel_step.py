"""What context, expert and tensor parallelism cost: bytes sent for a layer, and step time against a hand-written loop.

    python benchmarks/parallel_step.py                                # everything, about 10 minutes on two cores
    python benchmarks/parallel_step.py --part volume
    python benchmarks/parallel_step.py --part time --layout ulysses-2 experts-2 --rounds 4

Bytes are counted and don't depend on how busy the machine is. For a layer they are the difference of two models, of
which one has more layers; they are compared with the formulas of docs/parallelism.md. What `fully_shard` sends is a
column of its own.

The hand-written loop has a plain transformers model with the same parallelism, from the same files of
mindspeed_mm/parallel, with fully_shard and torch's AdamW, and neither our engine nor a data pipeline. The two loops run
in turn in the same processes, and their first losses must be equal.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from sent_bytes import CountSent, Volume, analytic_volume  # noqa: E402
from torch import nn  # noqa: E402

LAYERS, MORE = 1, 1  # of the models whose bytes are counted
VOLUME_TARGET, TIME_TARGET = 1.02, 1.02
ACCUMULATION = 2  # micro-batches of a timed step


@dataclass(frozen=True)
class Layout:
    """A parallelism to measure.

    Attributes:
        ranks: number of processes.
        flags: of a launch.
        fsdp2: keys of fsdp2.yaml.
        has_experts: whether the model is a Qwen3-MoE, else a Qwen3.
    """

    ranks: int
    flags: dict[str, Any] = field(default_factory=dict)
    fsdp2: dict[str, Any] = field(default_factory=dict)
    has_experts: bool = False

    @property
    def ranks_of_rows(self) -> int:
        """Number of ranks that process the same rows."""
        return int(self.flags.get("context_parallel_size", 1)) * int(self.flags.get("tensor_model_parallel_size", 1))


RING = {"context_parallel_algo": "megatron_cp_algo"}
HYBRID = {"context_parallel_algo": "hybrid_cp_algo", "ulysses_degree_in_cp": 2}
LAYOUTS = {
    "ulysses-2": Layout(2, {"context_parallel_size": 2}),
    "ring-2": Layout(2, {"context_parallel_size": 2, **RING}),
    "experts-2": Layout(2, {"expert_model_parallel_size": 2}, has_experts=True),
    "tensor-2": Layout(2, {"tensor_model_parallel_size": 2}),
    "tensor-2-sequence": Layout(2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "ulysses-4": Layout(4, {"context_parallel_size": 4}),
    "ring-4": Layout(4, {"context_parallel_size": 4, **RING}),
    "ring-2-ulysses-2": Layout(4, {"context_parallel_size": 4, **HYBRID}),
    "experts-4": Layout(4, {"expert_model_parallel_size": 4}, has_experts=True),
    "ulysses-2-experts-4": Layout(4, {"context_parallel_size": 2, "expert_model_parallel_size": 4}, has_experts=True),
    "tensor-2-shard-2": Layout(4, {"tensor_model_parallel_size": 2}),
    "tensor-4-sequence": Layout(4, {"tensor_model_parallel_size": 4, "sequence_parallel": True}),
    "tensor-2-ulysses-2": Layout(4, {"tensor_model_parallel_size": 2, "context_parallel_size": 2}),
}


@dataclass(frozen=True)
class Sizes:
    """Of a model and its micro-batches."""

    hidden: int
    layers: int
    vocabulary: int
    rows: int
    length: int


COUNTED = Sizes(hidden=64, layers=LAYERS, vocabulary=384, rows=2, length=64)
TIMED = Sizes(hidden=256, layers=4, vocabulary=2048, rows=2, length=256)


def model_directory(folder: Path, has_experts: bool, sizes: Sizes) -> Path:
    """Write a Qwen3 or Qwen3-MoE with random weights, unless it is there; returns its HF directory."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    name = f"{'moe' if has_experts else 'dense'}-{sizes.hidden}-{sizes.layers}-{sizes.vocabulary}"
    directory = folder / name
    if (directory / "config.json").exists():
        return directory
    fields: dict[str, Any] = {"hidden_size": sizes.hidden, "num_hidden_layers": sizes.layers, "head_dim": 16}
    fields |= {"num_attention_heads": sizes.hidden // 8, "num_key_value_heads": sizes.hidden // 16}
    fields |= {"vocab_size": sizes.vocabulary, "tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1}
    fields |= {"pad_token_id": 0, "max_position_embeddings": 2048, "intermediate_size": 2 * sizes.hidden}
    torch.manual_seed(0)
    if has_experts:
        experts = {
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": sizes.hidden,
            "mlp_only_layers": [],
        }
        model: Any = Qwen3MoeForCausalLM(Qwen3MoeConfig(**fields, **experts))
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**fields))
    model.save_pretrained(directory)
    return directory


def micro_batches(layout: Layout, sizes: Sizes, rank: int, number: int = 8) -> list[dict[str, Any]]:
    """The micro-batches of a rank: rows of one length, in which all tokens but the first are targets."""
    found = []
    for index in range(number):
        random = torch.Generator().manual_seed(index)
        ids = torch.randint(2, sizes.vocabulary, (sizes.rows, sizes.length), generator=random)
        found.append({"input_ids": ids, "labels": ids.clone()})
    own = rank // layout.ranks_of_rows
    return found[own :: layout.ranks // layout.ranks_of_rows]


def our_loop(
    layout: Layout, folder: Path, name: str, sizes: Sizes, accumulation: int = 1, model: dict[str, Any] | None = None
) -> Any:
    """Our loop over prepared micro-batches, in this process of several.

    Args:
        folder: where models are, or are to be written.
        name: of the run's folder in it.
        model: further keys of model.json.
    """
    import yaml
    from common import launch_words
    from our_loop import OurLoop

    rank = int(os.environ["RANK"])
    hf_dir = model_directory(folder, layout.has_experts, sizes)
    own = folder / f"{name}-files{rank}"
    own.mkdir()
    contents = {
        "mm_model": ("model.json", json.dumps({"init_from_hf_path": str(hf_dir), **(model or {})})),
        "mm_data": ("data.json", json.dumps(_data_json(hf_dir, own))),
        "mm_tool": ("tools.json", "{}"),
        "fsdp2_config_path": (
            "fsdp2.yaml",
            yaml.safe_dump({"sharding_size": "auto", "sub_modules_to_wrap": ["model.layers.{*}"], **layout.fsdp2}),
        ),
    }
    for file, content in contents.values():
        (own / file).write_text(content)
    words = launch_words(
        {flag: own / file for flag, (file, _) in contents.items()},
        folder / name,
        micro_batch_size=sizes.rows,
        global_batch_size=sizes.rows * accumulation * (layout.ranks // layout.ranks_of_rows),
        train_iters=100_000,
        seq_length=sizes.length,
        **layout.flags,
    )
    return OurLoop("pretrain_transformers.py", words, micro_batches(layout, sizes, rank), sizes.rows)


def _data_json(hf_dir: Path, folder: Path) -> dict[str, Any]:
    from common import data_param

    (folder / "rows.json").write_text("[]")  # micro-batches are made already
    return data_param(hf_dir, folder / "rows.json")


# --- bytes


@dataclass(frozen=True)
class Counted:
    """What a rank sent in a step of one micro-batch.

    Attributes:
        parallel: beside `fully_shard`, in the backward pass and outside of it.
        analytic: what the formulas give.
        fully_shard: its all-gathers and reductions.
    """

    parallel: Volume
    analytic: Volume
    fully_shard: float

    def __sub__(self, other: Counted) -> Counted:
        return Counted(
            self.parallel - other.parallel,
            self.analytic - other.analytic,
            self.fully_shard - other.fully_shard,
        )


def count_second_step(loop: Any, begin: Callable[[], None] = lambda: None) -> CountSent:
    """Count what this rank sends in the second step of our loop.

    Args:
        begin: called before it.
    """
    count = CountSent()

    def before_step(done: int) -> bool:
        if done == 1:
            begin()
            count.__enter__()
        elif done == 2:
            count.__exit__(None, None, None)
        return done < 2

    loop.train(before_step)
    return count


class Routes:
    """Counts which ranks' experts the routers choose for this rank's tokens."""

    def __init__(self, backend: Any) -> None:
        from mindspeed_mm.parallel.experts import find_experts

        self._mesh = backend.world.meshes.experts
        self._pairs: list[torch.Tensor] = []
        if self._mesh is not None:
            self._experts = backend._root.config.num_experts
            for module in find_experts(backend._root).values():
                module.register_forward_pre_hook(self._keep)

    def begin(self) -> None:
        """Forget what was counted."""
        self._pairs.clear()

    def _keep(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        _, chosen, _ = args
        ranks = self._mesh.size()
        self._pairs.append(torch.bincount(chosen.flatten() // (self._experts // ranks), minlength=ranks))

    def exchanged(self) -> int:
        """Pairs of a token and an expert of which one is on this rank and the other elsewhere, over all layers."""
        if self._mesh is None:
            return 0
        own = torch.stack(self._pairs).sum(0)
        of_all = [torch.empty_like(own) for _ in range(self._mesh.size())]
        dist.all_gather(of_all, own, group=self._mesh.get_group())
        rank = self._mesh.get_local_rank()
        sent, received = int(own.sum() - own[rank]), sum(int(other[rank]) for other in of_all) - int(own[rank])
        return sent + received


def volume_of_a_layer(name: str, folder: Path) -> tuple[Counted, Volume]:
    """What a rank of a layout sends for one decoder layer, and in a step outside of layers (the head, the step's sums).

    Args:
        name: of the layout.
        folder: where `model_directory` has written the models.
    """
    first, more = (_counted(LAYOUTS[name], folder, f"{name}-{sizes.layers}", sizes) for sizes in depths())
    layer = more - first  # MORE is 1
    beside = first.parallel - first.analytic - (layer.parallel - layer.analytic)
    return layer, beside


def _counted(layout: Layout, folder: Path, name: str, sizes: Sizes) -> Counted:
    loop = our_loop(layout, folder, name, sizes)
    routes = Routes(loop.backend)
    count = count_second_step(loop, routes.begin)
    tokens = sizes.rows * sizes.length
    analytic = analytic_volume(loop.backend._root.config, loop.run.dims, tokens, routes.exchanged())
    return Counted(Volume(count.total("forward"), count.total("backward")), analytic, count.total("fully_shard"))


def depths() -> list[Sizes]:
    """The sizes whose difference is a layer."""
    return [replace(COUNTED, layers=layers) for layers in (LAYERS, LAYERS + MORE)]


def print_volumes(names: Iterable[str], folder: Path) -> None:
    """Count layouts of this number of ranks; rank 0 prints a line for each, of the rank whose ratio is the largest."""
    for name in names:
        _forget_the_run()
        layer, outside = volume_of_a_layer(name, folder)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (layer, outside))
        layer, outside = max(of_ranks, key=lambda found: found[0].parallel.total / found[0].analytic.total)
        if dist.get_rank() == 0:
            found, expected = layer.parallel, layer.analytic
            print(
                f"{name:<22}{found.forward:>10.0f}{expected.forward:>10.0f}{found.backward:>10.0f}"
                f"{expected.backward:>10.0f}{found.total / expected.total:>9.4f}{outside.total:>12.0f}"
                f"{layer.fully_shard:>12.0f}",
                flush=True,
            )


HEADER = (
    f"bytes that a rank sends for a layer (targets: counted ÷ analytic <= {VOLUME_TARGET})\n"
    f"{'':<22}{'forward':>20}{'backward':>20}{'':>9}{'outside of':>12}{'of':>12}\n"
    f"{'layout':<22}{'counted':>10}{'analytic':>10}{'counted':>10}{'analytic':>10}{'ratio':>9}{'layers':>12}"
    f"{'fully_shard':>12}"
)


# --- time


def print_times(names: Iterable[str], folder: Path, sizes: Sizes, rounds: int, block: int) -> None:
    """Medians of our steps and of the hand-written loop's, in turn; rank 0 prints a line for each layout."""
    from common import median, timed
    from hand_written_loop import HandWrittenLoop

    for name in names:
        _forget_the_run()
        layout = LAYOUTS[name]
        ours = our_loop(layout, folder, f"{name}-timed", sizes, ACCUMULATION)
        hf_dir = model_directory(folder, layout.has_experts, sizes)
        batches = micro_batches(layout, sizes, dist.get_rank())
        cuts_rows = bool(layout.flags.get("sequence_parallel"))
        plain = HandWrittenLoop(hf_dir, ours.backend.world, batches, ACCUMULATION, cuts_rows)
        times = ours.alternate(block, rounds, {"hand-written": lambda loop=plain: timed(loop.step, block)})
        if dist.get_rank() == 0:
            _check_same_loss(folder / f"{name}-timed", plain.losses[0])
            mine, theirs = median(times["ours"]), median(times["hand-written"])
            print(
                f"{name:<22}{mine * 1e3:>10.1f}{theirs * 1e3:>14.1f}{mine / theirs:>9.3f}{len(times['ours']):>8}",
                flush=True,
            )


TIME_HEADER = (
    f"milliseconds of a step of {ACCUMULATION} micro-batches, medians (target: ratio <= {TIME_TARGET})\n"
    f"{'layout':<22}{'ours':>10}{'hand-written':>14}{'ratio':>9}{'steps':>8}"
)


def _check_same_loss(run: Path, expected: float) -> None:
    records = (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())
    found = next(record["loss"] for record in records if "loss" in record)
    if abs(found - expected) > 1e-5 * abs(expected):
        raise AssertionError(f"the loops don't train the same: first losses {found} and {expected}")


def _forget_the_run() -> None:
    """Make this process ready for another run."""
    from mindspeed_mm.configs.global_args import destroy_args

    destroy_args()
    gc.unfreeze()
    gc.collect()


# --- processes


def launch(part: str, names: Iterable[str], folder: Path, rounds: int, block: int, smallest: bool) -> None:
    """Measure layouts of one number of ranks in processes of one thread each."""
    names = list(names)
    ranks = LAYOUTS[names[0]].ranks
    words = [str(Path(__file__).resolve()), "--worker", "--part", part, "--layout", *names, "--folder", str(folder)]
    words += ["--rounds", str(rounds), "--block", str(block), *(["--smallest"] if smallest else [])]
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    subprocess.run(
        [*command, f"--nproc_per_node={ranks}", *words], check=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


def work(options: argparse.Namespace, timed: Sizes) -> None:
    """What each process does."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    if options.part in ("volume", "all"):
        print_volumes(options.layout, options.folder)
    if options.part in ("time", "all"):
        print_times(options.layout, options.folder, timed, options.rounds, options.block)
    dist.destroy_process_group()


def main() -> None:
    """Measure in processes of their own; print tables."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--part", choices=["volume", "time", "all"], default="all")
    parser.add_argument("--layout", choices=list(LAYOUTS), nargs="+", default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=5, help="steps that a loop makes in its turn")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", action="store_true")
    add_smallest(parser)
    options = parser.parse_args()
    timed = COUNTED if options.smallest else TIMED
    if options.worker:
        work(options, timed)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="parallel-step-"))
    for has_experts in (False, True):
        for sizes in (*depths(), timed):
            model_directory(folder, has_experts, sizes)  # before ranks would do it, each for itself
    of_two = [name for name in options.layout if LAYOUTS[name].ranks == 2]
    if options.smallest:
        print(HEADER, flush=True)
        launch("all", of_two[:2], folder, 1, 1, smallest=True)
        return
    of_four = [name for name in options.layout if LAYOUTS[name].ranks == 4]
    if options.part in ("volume", "all"):
        print(HEADER, flush=True)
        for names in filter(None, (of_two, of_four)):
            launch("volume", names, folder, options.rounds, options.block, smallest=False)
    if options.part in ("time", "all"):
        print(TIME_HEADER, flush=True)
        for name in of_two:
            launch("time", [name], folder, options.rounds, options.block, smallest=False)


if __name__ == "__main__":
    main()
