"""How much our loop costs on the Megatron backend: step time against the same Megatron-core model in a bare loop.

    python benchmarks/ptd_overhead.py             # every layout, about 9 minutes on two cores
    python benchmarks/ptd_overhead.py --layout dp2 --rounds 12

Both run in turn in the same processes on the same micro-batches. Our step is the whole of it: the schedule, the
reduction, the optimizer, the log line and metrics.jsonl every step. The bare loop is what Megatron's own training
script does in a step: schedule, `finalize_model_grads` with the number of tokens, clipping, optimizer, the loss
averaged for the log.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

ACCUMULATION = 4
BLOCK = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "1": {"use_distributed_optimizer": True},
    "dp2": {"use_distributed_optimizer": True},
    "tp2": {"tensor_model_parallel_size": 2, "use_distributed_optimizer": True},
    "pp2": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True, "variable_seq_lengths": True},
}
TRAINED = {"image_encoder": {"vision_encoder": {"freeze": False}, "vision_projector": {"freeze": False}}}


def main() -> None:
    """Run the layouts asked for and print medians and ratios."""
    from common import add_smallest, prepare

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layout", choices=[*LAYOUTS, "all"], default="all")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=BLOCK, help="steps that a contender makes in its turn")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--worker", choices=list(LAYOUTS))
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.layout, options.rounds, options.block = "pp2", 1, 1
    if options.worker:
        compare(options.worker, options.folder, options.rounds, options.block)
        return
    from importlib.metadata import version

    folder = options.folder or Path(tempfile.mkdtemp(prefix="ptd-overhead-"))
    prepare(folder, smallest=options.smallest)
    names = ("torch", "megatron-core", "transformers")
    print(", ".join(f"{n} {version(n)}" for n in names) + f"; {os.cpu_count()} cores, one thread a rank", flush=True)
    for layout in LAYOUTS if options.layout == "all" else [options.layout]:
        words = [str(Path(__file__).resolve()), "--worker", layout, "--folder", str(folder)]
        words += ["--rounds", str(options.rounds), "--block", str(options.block)]
        ranks = 1 if layout == "1" else 2
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, *words],
            check=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


class BareLoop:
    """Megatron-core alone, driven as its own training script drives it."""

    def __init__(self, ours: Any, batches: list[dict[str, Any]], micro_batch: int) -> None:
        """
        Args:
            ours: an `OurLoop`, whose layout, weights and schedule flags are taken over.
        """
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from our_loop import endless

        flags = ours.run.optimizer
        self.chunk = self._copy(ours.backend.chunks[0])
        self.config = self.chunk.config
        ddp = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = DistributedDataParallel(self.config, ddp, self.chunk)
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=flags.lr,
                weight_decay=flags.weight_decay,
                adam_beta1=flags.adam_beta1,
                adam_beta2=flags.adam_beta2,
                clip_grad=flags.clip_grad,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        self.config.grad_scale_func = self.optimizer.scale_loss
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.calculate_per_token_loss = True
        self.batches, self.sizes, self.micro_batch = endless(batches), ours.run.batch, micro_batch

    @staticmethod
    def _copy(source: Any) -> Any:
        """A chunk with the same structure and weights, and a configuration of its own."""
        import copy

        import torch

        from mindspeed_mm.backends.ptd import materialize_chunk
        from mindspeed_mm.models.megatron.vlm_model import VLModel

        with torch.device("meta"):
            chunk = VLModel(source.hf_config, source.family, source.sizes, source.stage, source.meta_model())
        materialize_chunk(chunk, torch.device("cpu"))
        chunk.load_state_dict(source.state_dict())
        chunk.seq_length, chunk.model_type = source.seq_length, source.model_type
        chunk.config = copy.copy(source.config)
        return chunk

    def step(self) -> None:
        """One optimizer step."""
        import torch
        import torch.distributed as dist
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def loss_func(output: dict[str, Any]) -> Any:
            tokens = output["denominator"].int()
            return output["loss"], tokens, {"loss": torch.stack([output["loss"].detach(), tokens.float()])}

        def forward_step(iterator: Any, model: Any) -> Any:
            batch = dict(next(iterator))
            batch.pop("num_rows", None)
            return model(**self.chunk.prepare(batch)), loss_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        reported = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=self.batches,
            model=self.model,
            num_microbatches=self.sizes.num_microbatches,
            seq_length=self.sizes.seq_length,
            micro_batch_size=self.micro_batch,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        if reported:
            figures = torch.stack([r["loss"] for r in reported]).sum(0)
            dist.all_reduce(figures, group=parallel_state.get_data_parallel_group())
            (figures[0] / figures[1]).item(), float(norm)


def our_ptd_loop(
    folder: Path, name: str, layout: str, batches: list[dict[str, Any]], accumulation: int, replicas: int
) -> Any:
    """Our loop on the Megatron backend over prepared micro-batches.

    Args:
        name: of the run's folder.
    """
    from step_overhead import our_loop

    return our_loop(
        folder,
        name,
        batches,
        accumulation,
        "pretrain_vlm.py",
        data_parallel=replicas,
        model={"model_id": "qwen2_5_vl", **TRAINED},
        use_torch_fsdp2=None,
        fsdp2_config_path=None,
        seq_length=512,
        **LAYOUTS[layout],
    )


def compare(layout: str, folder: Path, rounds: int, block: int) -> None:
    """Median of our step ÷ median of the bare loop's."""
    import torch
    from common import collated_batches, median, prepare, timed
    from step_overhead import MICRO_BATCH

    torch.set_num_threads(1)
    hf_dir, data_file = prepare(folder)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    replicas = world if layout == "dp2" else 1
    batches = collated_batches(hf_dir, data_file, MICRO_BATCH)[rank % replicas :: replicas]
    ours = our_ptd_loop(folder, f"run_{layout}", layout, batches, ACCUMULATION, replicas)
    bare = BareLoop(ours, batches, MICRO_BATCH)
    times = ours.alternate(block, rounds, {"bare": lambda: timed(bare.step, block)})
    if rank == 0:
        mine, theirs = median(times["ours"]), median(times["bare"])
        print(
            f"{layout}: {MICRO_BATCH} x {ACCUMULATION} rows a replica: ours {mine * 1e3:.1f} ms, "
            f"bare Megatron-core loop {theirs * 1e3:.1f} ms, ratio {mine / theirs:.3f} (target <= 1.02)",
            flush=True,
        )


if __name__ == "__main__":
    main()
