"""How much our loop costs a generation model: step time against a plain diffusers FSDP2 loop, and what features save.

    python benchmarks/generation_step.py             # about 3 minutes on two cores
    python benchmarks/generation_step.py --ranks 1

Ours and the plain loop run in turn in the same processes, over the same clips and captions, and then once more with
clips and captions that ours has encoded before: a Wan transformer of 5.5 M parameters, a small AutoencoderKLWan and a
small UMT5. A step is the whole of it: encoding, noise, forward and backward of two micro-batches, reduction, clipping,
AdamW, the log line and metrics.jsonl.
"""

from __future__ import annotations

import argparse
import json
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

ROWS, ACCUMULATION, BATCHES = 2, 2, 4
BLOCK = 4  # steps
FRAMES, SIDE, LONGEST, SHIFT = 9, 64, 16, 3.0
WAN = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 64,
    "freq_dim": 64,
    "ffn_dim": 1024,
    "num_layers": 4,
    "cross_attn_norm": True,
    "qk_norm": "rms_norm_across_heads",
    "rope_max_seq_len": 64,
}
WORDS = "red green blue small large round square moves left right above below slowly fast".split()  # noqa: SIM905


def main() -> None:
    """Run the contenders in `--ranks` processes and print medians and ratios."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=BLOCK, help="steps that a contender makes in its turn")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--folder", type=Path)
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.rounds = options.block = 1
    if options.worker:
        compare(options.folder, options.rounds, options.block)
        return
    folder = options.folder or Path(tempfile.mkdtemp(prefix="generation-step-"))
    prepare(folder)
    print(versions())
    words = [str(Path(__file__).resolve()), "--worker", "--folder", str(folder)]
    words += ["--rounds", str(options.rounds), "--block", str(options.block)]
    command = [sys.executable, *words]
    if options.ranks > 1:
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command = [*launcher, f"--nproc_per_node={options.ranks}", *words]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def versions() -> str:
    """Versions and threads that the numbers hold for."""
    from importlib.metadata import version

    names = ("torch", "diffusers", "transformers")
    return ", ".join(f"{n} {version(n)}" for n in names) + f"; {os.cpu_count()} cores, one thread a rank"


def prepare(folder: Path) -> None:
    """Write transformer, vae, text_encoder and tokenizer with random weights."""
    import torch
    from diffusers import AutoencoderKLWan, WanTransformer3DModel
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, UMT5Config, UMT5EncoderModel

    if (folder / "tokenizer").is_dir():
        return
    torch.manual_seed(0)
    WanTransformer3DModel(**WAN).save_pretrained(folder / "transformer")
    AutoencoderKLWan(base_dim=8, z_dim=16, num_res_blocks=1).save_pretrained(folder / "vae")
    text = UMT5Config(vocab_size=64, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4)
    UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "</s>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")
    fast.save_pretrained(folder / "tokenizer")


def micro_batches(rank: int) -> list[dict[str, Any]]:
    """Collated micro-batches of this rank, as the data room hands them out."""
    import random

    import torch

    from mindspeed_mm.utils.sample_random import sample_key

    rng = random.Random(rank)
    generator = torch.Generator().manual_seed(rank)
    made = []
    for number in range(BATCHES):
        rows = [rank * 1000 + number * ROWS + i for i in range(ROWS)]
        made.append(
            {
                "video": torch.rand(ROWS, 3, FRAMES, SIDE, SIDE, generator=generator) * 2 - 1,
                "captions": [" ".join(rng.choices(WORDS, k=6)) for _ in rows],
                "sample_keys": torch.tensor([sample_key(0, row, 0) for row in rows]),
                "sample_weights": torch.ones(ROWS),
                "num_rows": ROWS,
                "num_tokens": ROWS * 3 * 16,
            }
        )
    return made


def model_json(folder: Path) -> dict[str, Any]:
    """model.json's content."""
    return {
        "task": "t2v",
        "ae": {"from_pretrained": str(folder / "vae")},
        "text_encoder": {"from_pretrained": str(folder / "text_encoder"), "dtype": "fp32", "max_length": LONGEST},
        "predictor": {"from_pretrained": str(folder / "transformer")},
        "diffusion": {
            "model_id": "flow_matching",
            "shift": SHIFT,
            "sampling": "logit_normal",
            "weighting": "uniform",
        },
    }


def our_loop(folder: Path, batches: list[dict[str, Any]], name: str) -> Any:
    """Our loop over prepared micro-batches."""
    from common import launch_words
    from our_loop import OurLoop

    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    files = folder / f"{name}{rank}"
    files.mkdir(exist_ok=True)
    data = {"dataset_param": {"dataset_type": "t2v", "basic_parameters": {"data_path": "unused"}}}
    contents = {
        "mm_model": ("model.json", json.dumps(model_json(folder))),
        "mm_data": ("data.json", json.dumps(data)),
        "mm_tool": ("tools.json", "{}"),
        "fsdp2_config_path": ("fsdp2.yaml", "sharding_size: auto\nsub_modules_to_wrap: ['predictor.blocks.{*}']\n"),
    }
    for file, text in contents.values():
        (files / file).write_text(text)
    words = launch_words(
        {flag: files / file for flag, (file, _) in contents.items()},
        folder / f"run_{name}",
        micro_batch_size=ROWS,
        global_batch_size=ROWS * ACCUMULATION * world,
        train_iters=100_000,
    )
    return OurLoop("pretrain_sora.py", words, batches, ROWS)


def features(model: Any, batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What feature extraction would have stored of micro-batches."""
    made = []
    for batch in batches:
        encoded = model.encoder.encode(batch)
        kept = {k: v for k, v in batch.items() if k not in ("video", "captions")}
        text = {f"text.{name}": value for name, value in encoded["text"].items()}
        made.append({**kept, "latents": encoded["latents"], **text})
    return made


class PlainLoop:
    """What one would write with diffusers and PyTorch: fully_shard, flow matching, clipping, AdamW."""

    def __init__(self, folder: Path, batches: list[dict[str, Any]]) -> None:
        import torch
        import torch.distributed as dist
        from diffusers import AutoencoderKLWan, WanPipeline, WanTransformer3DModel
        from our_loop import endless
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import AutoTokenizer, UMT5EncoderModel

        self.vae = AutoencoderKLWan.from_pretrained(folder / "vae").eval()
        encoder = UMT5EncoderModel.from_pretrained(folder / "text_encoder").eval()
        tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
        self.pipeline = WanPipeline(
            tokenizer=tokenizer, text_encoder=encoder, vae=None, scheduler=None, transformer=None
        )
        model = WanTransformer3DModel.from_pretrained(folder / "transformer").train()
        self.world = int(os.environ.get("WORLD_SIZE", "1"))
        if self.world > 1:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        decay = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.model, self.batches = model, endless(batches)
        self.mean = torch.tensor(self.vae.config.latents_mean).view(1, -1, 1, 1, 1)
        self.deviation = torch.tensor(self.vae.config.latents_std).view(1, -1, 1, 1, 1)

    def step(self) -> None:
        """One optimizer step."""
        import torch
        import torch.distributed as dist

        total = torch.zeros(())
        for i in range(ACCUMULATION):
            batch = next(self.batches)
            if self.world > 1:
                self.model.set_is_last_backward(i == ACCUMULATION - 1)
            with torch.no_grad():
                latents = self.vae.encode(batch["video"]).latent_dist.mode()
                states, _ = self.pipeline.encode_prompt(
                    batch["captions"], do_classifier_free_guidance=False, max_sequence_length=LONGEST
                )
            latents = (latents - self.mean) / self.deviation
            noise = torch.randn_like(latents)
            sigmas = torch.sigmoid(torch.randn(len(latents)))
            sigmas = SHIFT * sigmas / (1 + (SHIFT - 1) * sigmas)
            spread = sigmas.view(-1, 1, 1, 1, 1)
            noisy = (1 - spread) * latents + spread * noise
            predicted = self.model(
                hidden_states=noisy, timestep=sigmas * 1000, encoder_hidden_states=states, return_dict=False
            )[0]
            loss = torch.nn.functional.mse_loss(predicted.float(), noise - latents) / ACCUMULATION
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.world > 1:
            dist.all_reduce(total)
            norm = norm.full_tensor()
        (total / self.world).item(), norm.item()


def compare(folder: Path, rounds: int, block: int) -> None:
    """Medians of our step and of the plain loop's, then of our step on features and the plain loop's; and ratios."""
    import torch
    from common import median, timed

    torch.set_num_threads(1)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    batches = micro_batches(rank)
    ours, plain = our_loop(folder, batches, "clips"), PlainLoop(folder, batches)
    others = {"plain": lambda: timed(plain.step, block)}
    times = ours.alternate(block, rounds, others)
    encoded = features(ours.backend.model, batches)
    cached = our_loop(folder, encoded, "features").alternate(block, rounds, others)
    if rank == 0:
        mine, theirs = median(times["ours"]), median(times["plain"])
        ready, beside = median(cached["ours"]), median(cached["plain"])
        print(
            f"step, {world} ranks, {ROWS} x {ACCUMULATION} clips a rank: ours {mine * 1e3:.1f} ms, "
            f"plain diffusers loop {theirs * 1e3:.1f} ms, ratio {mine / theirs:.3f} (target <= 1.02)\n"
            f"on features made before: {ready * 1e3:.1f} ms, the plain loop beside it, which encodes: "
            f"{beside * 1e3:.1f} ms; ratio to ours on the fly {ready / beside / (mine / theirs):.3f}"
        )


if __name__ == "__main__":
    main()
