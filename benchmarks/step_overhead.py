"""How much our loop costs: step time against a bare FSDP2 loop and the HF Trainer, and time to the first step.

    python benchmarks/step_overhead.py            # everything, about 4 minutes on two cores
    python benchmarks/step_overhead.py --part step --ranks 2

All contenders of a ratio run in turn in the same processes (or, for the start, as processes in turn). Our step is the
whole of it: everything that the training loop does from one step's begin to the next's, with the log line and
metrics.jsonl every step.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

MICRO_BATCH = 4
ACCUMULATION = 2
BLOCK = 8  # steps: every micro-batch of the data set once, for every contender


def main() -> None:
    """Run the parts asked for and print their medians and ratios."""
    from common import add_smallest

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--part", choices=["step", "trainer", "start", "all"], default="all")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--block", type=int, default=BLOCK, help="steps that a contender makes in its turn")
    parser.add_argument("--worker", choices=["step", "serve-ours", "serve-trainer", "start-trainer", "start-bare"])
    parser.add_argument("--folder", type=Path)
    add_smallest(parser)
    options = parser.parse_args()
    if options.smallest:
        options.rounds = options.block = 1
    folder: Path = options.folder or Path(tempfile.mkdtemp(prefix="step-overhead-"))
    workers = {
        "start-trainer": partial(first_step_of_trainer, folder),
        "start-bare": partial(first_step_of_bare_loop, folder),
        "step": partial(step_against_bare_loop, folder, options.rounds, options.block),
        "serve-ours": partial(serve_ours, folder, options.block),
        "serve-trainer": partial(serve_trainer, folder, options.block),
    }
    if options.worker:
        workers[options.worker]()
        return
    from common import prepare

    prepare(folder, smallest=options.smallest)
    print(versions())
    if options.part in ("step", "all"):
        launch("step", folder, options.rounds, options.block, options.ranks)
    if options.part in ("trainer", "all"):
        step_against_trainer(folder, options.rounds, options.block)
    if options.part in ("start", "all"):
        time_to_first_step(folder, 1 if options.smallest else max(3, options.rounds // 2))


def versions() -> str:
    """Versions and threads that the numbers hold for."""
    from importlib.metadata import version

    names = ("torch", "transformers", "accelerate")
    return ", ".join(f"{n} {version(n)}" for n in names) + f"; {os.cpu_count()} cores, one thread a rank"


def launch(part: str, folder: Path, rounds: int, block: int, ranks: int) -> None:
    """Run a part in `ranks` processes of one thread each."""
    words = [str(Path(__file__).resolve()), "--worker", part, "--folder", str(folder)]
    words += ["--rounds", str(rounds), "--block", str(block)]
    command = [sys.executable, *words]
    if ranks > 1:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", *words]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def our_loop(
    folder: Path,
    name: str,
    batches: list[dict[str, Any]],
    accumulation: int,
    script: str = "pretrain_transformers.py",
    data_parallel: int = int(os.environ.get("WORLD_SIZE", "1")),
    model: dict[str, Any] | None = None,
    **flags: Any,
) -> Any:
    """Our loop over prepared micro-batches.

    Args:
        name: of the run's folder, which must be new.
        script: entry script whose callbacks are used.
        data_parallel: number of ranks with rows of their own.
        model: further keys of model.json; None: transformers' own attention, as in the loops beside it.
        flags: further flags.
    """
    from common import launch_words, prepare, write_files
    from our_loop import OurLoop

    from mindspeed_mm.data.adapter import DefaultAdapter

    model = {"attn_implementation": "sdpa"} if model is None else model
    files = write_files(folder / f"files{os.environ.get('RANK', '0')}", *prepare(folder), model)
    words = launch_words(
        files,
        folder / name,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * accumulation * data_parallel,
        train_iters=100_000,
        **flags,
    )
    return OurLoop(script, words, batches, MICRO_BATCH, DefaultAdapter())


class BareLoop:
    """What one would write with PyTorch alone: fully_shard, exact token mean, clipping, AdamW."""

    def __init__(self, folder: Path, batches: list[dict[str, Any]], accumulation: int) -> None:
        import torch
        import torch.distributed as dist
        from common import prepare
        from our_loop import endless
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from transformers import Qwen2_5_VLForConditionalGeneration

        hf_dir, _ = prepare(folder)
        model = Qwen2_5_VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32).train()
        self.world = dist.get_world_size()
        if self.world > 1:
            mesh = init_device_mesh("cpu", (self.world,))
            for block in (*model.model.visual.blocks, *model.model.language_model.layers):
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
        decay = [p for p in model.parameters() if p.dim() > 1]
        plain = [p for p in model.parameters() if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), eps=1e-8, fused=True)
        self.model, self.batches, self.accumulation = model, endless(batches), accumulation

    def step(self) -> None:
        """One optimizer step."""
        import torch
        import torch.distributed as dist

        micro = [dict(next(self.batches)) for _ in range(self.accumulation)]
        tokens = torch.tensor(float(sum((b["labels"][:, 1:] != -100).sum() for b in micro)))
        dist.all_reduce(tokens)
        total = torch.zeros(())
        for i, batch in enumerate(micro):
            if self.world > 1:
                self.model.set_is_last_backward(i == len(micro) - 1)
            labels = batch.pop("labels")
            batch.pop("num_rows", None)
            logits = self.model(**batch, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten(), reduction="sum"
            )
            loss = loss * self.world / tokens
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        dist.all_reduce(total)
        (total / self.world).item(), (norm.full_tensor() if self.world > 1 else norm).item()


def step_against_bare_loop(folder: Path, rounds: int, block: int) -> None:
    """Median of our step ÷ median of the bare loop's, on every rank's own micro-batches."""
    import torch
    from common import collated_batches, median, prepare, timed

    torch.set_num_threads(1)
    hf_dir, data_file = prepare(folder)
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    # every rank's micro-batches hold images: the bare loop can't do without
    batches = [b for b in collated_batches(hf_dir, data_file, MICRO_BATCH) if "pixel_values" in b][rank::world]
    ours = our_loop(folder, "run_step", batches, ACCUMULATION)
    bare = BareLoop(folder, batches, ACCUMULATION)
    times = ours.alternate(block, rounds, {"bare": lambda: timed(bare.step, block)})
    if rank == 0:
        mine, theirs = median(times["ours"]), median(times["bare"])
        print(
            f"step, {world} ranks, {MICRO_BATCH} x {ACCUMULATION} rows a rank: ours {mine * 1e3:.1f} ms, "
            f"bare FSDP2 loop {theirs * 1e3:.1f} ms, ratio {mine / theirs:.3f} (target <= 1.02)"
        )


def step_against_trainer(folder: Path, rounds: int, block: int) -> None:
    """Median of our step ÷ median of the HF Trainer's, one process each, in turn, over the same micro-batches.

    A process each: the Trainer would wrap its model in DDP if it found our process group.
    """
    from common import BlockServer, alternate, median

    words = [str(Path(__file__).resolve()), "--folder", str(folder), "--block", str(block), "--worker"]
    ours, theirs = (
        BlockServer([*words, worker], folder / f"{worker}.txt") for worker in ("serve-ours", "serve-trainer")
    )
    ours.block(), theirs.block()
    times = alternate({"ours": ours.block, "trainer": theirs.block}, rounds)
    ours.close(), theirs.close()
    mine, other = median(times["ours"]), median(times["trainer"])
    print(
        f"step, 1 process, {MICRO_BATCH} x {ACCUMULATION} rows: ours {mine * 1e3:.1f} ms, "
        f"HF Trainer {other * 1e3:.1f} ms, ratio {mine / other:.3f} (target <= 1.0)"
    )


def serve_ours(folder: Path, block: int) -> None:
    """Run blocks of our steps on request (see BlockServer)."""
    import torch
    from common import collated_batches, prepare

    torch.set_num_threads(1)
    ours = our_loop(folder, "run_serve", collated_batches(*prepare(folder), MICRO_BATCH), ACCUMULATION)

    def answer(times: list[float]) -> bool:
        print("times " + json.dumps(times), file=sys.__stdout__, flush=True)
        return bool(sys.stdin.readline())

    if sys.stdin.readline():
        ours.blocks(block, answer)


def serve_trainer(folder: Path, block: int) -> None:
    """Run blocks of the HF Trainer's steps on request (see BlockServer)."""
    import torch
    from common import collated_batches, prepare

    torch.set_num_threads(1)
    loop = TrainerLoop(folder, collated_batches(*prepare(folder), MICRO_BATCH), ACCUMULATION)
    for _ in sys.stdin:
        print("times " + json.dumps(loop.block(block)), flush=True)


class TrainerLoop:
    """The HF Trainer over prepared micro-batches."""

    def __init__(self, folder: Path, batches: list[dict[str, Any]], accumulation: int) -> None:
        import torch
        from common import prepare
        from transformers import Qwen2_5_VLForConditionalGeneration

        hf_dir, _ = prepare(folder)
        self.folder, self.accumulation = folder, accumulation
        self.model = Qwen2_5_VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32)
        self.batches = [{k: v for k, v in b.items() if k != "num_rows"} for b in batches]

    def block(self, steps: int) -> list[float]:
        """Seconds of each of `steps` steps, from one step's end to the next's."""
        from transformers import Trainer, TrainerCallback

        ends: list[float] = []

        class Clock(TrainerCallback):
            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                ends.append(time.perf_counter())

        class InOrder(Trainer):
            def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
                return range((steps + 1) * ACCUMULATION)

        trainer = InOrder(
            model=self.model,
            args=trainer_arguments(self.folder, self.accumulation, steps + 1),
            train_dataset=Prepared(self.batches, (steps + 1) * self.accumulation),
            data_collator=lambda items: items[0],
            callbacks=[Clock()],
        )
        with redirect_stdout(io.StringIO()):
            trainer.train()
        return [later - earlier for earlier, later in pairwise(ends)]


class Prepared:
    """Micro-batches as a data set of one 'row' each."""

    def __init__(self, batches: list[dict[str, Any]], length: int) -> None:
        self.batches, self.length = batches, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self.batches[index % len(self.batches)]


def trainer_arguments(folder: Path, accumulation: int, steps: int, rows: int = 1, workers: int = 0) -> Any:
    """Arguments of the HF Trainer that match our flags."""
    from transformers import TrainingArguments

    return TrainingArguments(
        output_dir=str(folder / "trainer"),
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=accumulation,
        max_steps=steps,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        max_grad_norm=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
        dataloader_num_workers=workers,
        dataloader_pin_memory=False,
    )


def time_to_first_step(folder: Path, rounds: int) -> None:
    """Median seconds from the command to the end of the first step: ours, a Trainer script's, a bare loop's, in turn.

    The bare loop imports torch and the model's own modules of transformers, and does nothing but the step: less isn't
    possible with this model.
    """
    from common import alternate, launch_words, median, prepare, write_files

    hf_dir, data_file = prepare(folder)
    files = write_files(folder / "files", hf_dir, data_file)
    words = launch_words(
        files,
        None,
        micro_batch_size=MICRO_BATCH,
        global_batch_size=MICRO_BATCH * ACCUMULATION,
        train_iters=1,
        num_workers=1,
    )
    ours = [sys.executable, str(ROOT / "pretrain_transformers.py"), *words]
    this = [sys.executable, str(Path(__file__).resolve()), "--folder", str(folder), "--worker"]
    commands = {"ours": ours, "trainer": [*this, "start-trainer"], "bare": [*this, "start-bare"]}
    if rounds > 1:
        for command in commands.values():
            first_line_seconds(command)
    times = alternate({name: lambda c=command: [first_line_seconds(c)] for name, command in commands.items()}, rounds)
    mine, other, bare = (median(times[name]) for name in ("ours", "trainer", "bare"))
    print(
        f"command to end of first step, 1 process: ours {mine:.2f} s, HF Trainer {other:.2f} s, "
        f"ratio {mine / other:.3f} (target <= 0.75); a bare loop {bare:.2f} s, its ratio {bare / other:.3f}"
    )


def first_line_seconds(command: list[str]) -> float:
    """Seconds until the command prints its first step.

    Compiled modules are kept, as they usually are: without that each start would compile those that are not installed.
    """
    started = time.perf_counter()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stdout is not None
        seconds = None
        for line in process.stdout:
            if seconds is None and ("iteration        1/" in line or "first step" in line):
                seconds = time.perf_counter() - started
        errors = process.stderr.read() if process.stderr else ""
    if seconds is None:
        raise RuntimeError(f"{' '.join(command)} made no step:\n{errors[-2000:]}")
    return seconds


def first_step_of_trainer(folder: Path) -> None:
    """A plain HF Trainer script on the same rows: processor, collator, one step."""
    import torch
    from common import prepare
    from transformers import AutoProcessor, Qwen2_5_VLForConditionalGeneration, Trainer, TrainerCallback

    hf_dir, data_file = prepare(folder)
    processor = AutoProcessor.from_pretrained(hf_dir)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32)

    class FirstStep(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            print("first step", flush=True)

    trainer = Trainer(
        model=model,
        args=trainer_arguments(folder, ACCUMULATION, 1, MICRO_BATCH, workers=1),
        train_dataset=json.loads(data_file.read_text()),
        data_collator=lambda rows: collated(rows, processor, data_file.parent),
        callbacks=[FirstStep()],
    )
    trainer.train()


def first_step_of_bare_loop(folder: Path) -> None:
    """The fewest imports and the least work with which the same model makes the same step, one process, no checks."""
    import gc

    gc.disable()
    import torch
    from common import prepare
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLForConditionalGeneration
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

    hf_dir, data_file = prepare(folder)
    processor = Qwen2_5_VLProcessor.from_pretrained(hf_dir)
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(hf_dir, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = json.loads(data_file.read_text())
    for step in range(ACCUMULATION):
        batch = collated(rows[step * MICRO_BATCH : (step + 1) * MICRO_BATCH], processor, data_file.parent)
        model(**batch).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    print("first step", flush=True)


def collated(rows: list[dict[str, Any]], processor: Any, folder: Path) -> dict[str, Any]:
    """A micro-batch of rows, by the processor's own template."""
    from PIL import Image

    texts, images = [], []
    for row in rows:
        messages = []
        for message in row["messages"]:
            parts: list[dict[str, Any]] = [{"type": "image"}] * message["content"].count("<image>")
            parts = [*parts, {"type": "text", "text": message["content"].replace("<image>", "")}]
            messages.append({"role": message["role"], "content": parts})
        texts.append(processor.apply_chat_template(messages, tokenize=False))
        images += [Image.open(folder / p) for p in row["images"]]
    batch = processor(text=texts, images=images or None, padding=True, padding_side="right", return_tensors="pt")
    batch["labels"] = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    return dict(batch)


if __name__ == "__main__":
    main()
