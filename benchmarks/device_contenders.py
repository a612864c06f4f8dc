"""Training loops that the benchmark on a device compares, each over the same weights and rows, and what they take."""

from __future__ import annotations

import gzip
import json
import shutil
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from device_cases import CASES, MICRO_ROWS, Case, data_param, positions_of
from device_trace import STEP, StepFigures, read_trace

ROOT = Path(__file__).resolve().parents[1]
WARM, WATCHED = 3, 2
"""Steps before the timed ones, and steps whose waits for the device are listed."""
LOGGED = 10
"""Steps that a run logs at its beginning; none of those here shall be."""
TRAINER_MICRO_BATCHES = 6
"""Padded micro-batches of a step of the HF Trainer: about as many tokens as in two packs."""


class Meter:
    """Is called between the steps of a loop: times a block of them, profiles one, and then watches for waits.

    Attributes:
        device: this process's accelerator.
        timed: steps of the block that is timed.
        seconds: of that block.
        waits: places where two steps after it waited for the device.
        is_strict: whether a wait for the device is an error now.
        no_trace: why there is no trace of a step; None: there is one.
        last: steps in all.
    """

    def __init__(self, folder: Path, timed: int, *, watches: bool, keep: Path | None = None) -> None:
        """
        Args:
            folder: for the trace.
            timed: steps of the block.
            watches: whether waits for the device are listed, and then are errors, in further steps.
            keep: where the trace is kept, compressed; None: nowhere.
        """
        from mindspeed_mm import accelerator

        self.device, self._folder, self._keep = accelerator.current(), folder, keep
        self.timed = timed
        self.seconds = 0.0
        self.waits: list[str] = []
        self.is_strict = False
        self.no_trace: str | None = None
        self._watch = watches and self.device.name == "cuda"
        self._profiler: Any = None
        self._warnings: Any = None
        self._span: Any = None
        self._figures: StepFigures | None = None
        self.last = WARM + timed + 1 + (WATCHED + 1 if self._watch else 0)

    def before_step(self, done: int) -> bool:
        """Whether there is to be another step after `done` of them."""
        profiled = WARM + self.timed
        if done == WARM:
            self.device.synchronize()
            self.seconds = -time.perf_counter()
        elif done == profiled:
            self.device.synchronize()
            self.seconds += time.perf_counter()
            self._begin_profile()
        elif done == profiled + 1:
            self._end_profile()
            if self._watch:
                self._begin_watch()
        elif done == profiled + 1 + WATCHED:
            self._end_watch()
            torch.cuda.set_sync_debug_mode("error")
            self.is_strict = True
        if done == self.last:
            self.close()
        return done < self.last

    @property
    def is_timed(self) -> bool:
        """Whether the block is over, and what follows may fail without taking its time away."""
        return self.seconds > 0

    def close(self) -> None:
        """Allow waits again."""
        if self.is_strict or self._warnings is not None:
            torch.cuda.set_sync_debug_mode("default")
            self.is_strict = False

    def _begin_profile(self) -> None:
        try:
            self._profiler = torch.profiler.profile(activities=self.device.activities())
            self._profiler.start()
            self._span = torch.profiler.record_function(STEP)
            self._span.__enter__()
        except Exception as error:  # of the tracing library, on a machine that lacks something
            self.no_trace = said(error)

    def _end_profile(self) -> None:
        if self.no_trace is not None:
            return
        self._span.__exit__(None, None, None)
        self.device.synchronize()
        try:
            self._profiler.stop()
            self._profiler.export_chrome_trace(str(self._folder / "trace.json"))
            self._figures = read_trace(self._folder / "trace.json")
        except Exception as error:
            self.no_trace = said(error)
        self._profiler = None
        if self._keep is not None and self.no_trace is None:
            with open(self._folder / "trace.json", "rb") as trace, gzip.open(self._keep, "wb", 4) as kept:
                shutil.copyfileobj(trace, kept)

    def _begin_watch(self) -> None:
        self._warnings = warnings.catch_warnings(record=True)
        self._seen = self._warnings.__enter__()
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")

    def _end_watch(self) -> None:
        torch.cuda.set_sync_debug_mode("default")
        self._warnings.__exit__(None, None, None)
        self._warnings = None
        for one in self._seen:
            place = short_place(one.filename, one.lineno)
            if "synchronizing" in str(one.message) and place not in self.waits:
                self.waits.append(place)

    def cells(self) -> dict[str, Any]:
        """The step's time, and what the trace says."""
        cells = {"step_ms": self.seconds / self.timed * 1e3, "peak_bytes": self.device.max_memory_allocated()}
        return cells if self._figures is None else {**cells, **asdict(self._figures)}


def short_place(file: str, line: int) -> str:
    """A place in a file, below the repository or the installed packages."""
    path = str(Path(file)).replace(f"{ROOT}/", "").rpartition("site-packages/")[2]
    return f"{path}:{line}"


def innermost(error: BaseException) -> str:
    """The innermost frame of an error, and the innermost one of this repository if that is another."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "no stack"
    own = [frame for frame in frames if frame.filename.startswith(str(ROOT)) and "/.venv/" not in frame.filename]
    places = [short_place(frame.filename, frame.lineno or 0) for frame in (frames[-1], *own[-1:])]
    return " from ".join(dict.fromkeys(places))


def said(error: BaseException) -> str:
    """The first line of an error, its kind, and where it comes from."""
    message = (str(error).strip().splitlines() or [""])[0][:300]
    return f"{message} ({type(error).__name__} at {innermost(error)})"


def speed(name: str, case_name: str, folder: Path, smallest: bool, keep: Path | None) -> Iterator[dict[str, Any]]:
    """Run a contender; yields rows of the table.

    Args:
        name: a key of CONTENDERS.
        folder: the case's, with its model and micro-batches.
        keep: folder for the trace of ours; None: it isn't kept.
    """
    case = CASES[case_name]
    own = folder / name.replace(" ", "_")
    own.mkdir(exist_ok=True)
    file = None if keep is None or name != "ours" else keep / f"trace_{case_name.replace(' ', '_')}.json.gz"
    timed = 2 if smallest else case.timed
    meter = Meter(own, timed, watches=name.startswith("ours"), keep=file)
    yield from CONTENDERS[name](case, folder, own, meter, smallest)


def figures(case: Case, folder: Path, meter: Meter, units: float, loss: float | None, note: str) -> dict[str, Any]:
    """The row of a contender.

    Args:
        units: tokens or samples of all timed steps.
        loss: of the first step.
    """
    from mindspeed_mm import accelerator

    note += f"; no trace: {meter.no_trace}" if meter.no_trace else ""
    cells = {**meter.cells(), f"{case.unit}_per_s": units / meter.seconds, "loss": loss, "note": note}
    known, peak = folder / "flops.json", accelerator.current().peak_flops("bf16")
    if known.exists() and peak:
        cells["mfu"] = json.loads(known.read_text())["per_unit"] * units / meter.seconds / peak
    return cells


# --- ours


def ours_words(
    folder: Path, own: Path, case: Case, smallest: bool, *, fsdp2: bool, compiled: bool, **more: Any
) -> list[str]:
    """The command line of a run of ours, whose files are written into `own`; `more` are further flags."""
    from common import launch_words

    data: dict[str, Any] = {"dataset_param": {"dataset_type": "feature", "basic_parameters": {"data_path": "unused"}}}
    model: dict[str, Any] = {"init_from_hf_path": str(folder / "hf")}
    flags: dict[str, Any] = {"seq_length": case.pack_length(smallest) if case.capacity else None}
    if case.capacity is not None:
        data = data_param(folder, case.pack_length(smallest))
    else:
        model = {"task": "t2v", "predictor": {"from_pretrained": str(folder / "hf")}}
        model |= {"load_video_features": True, "load_text_features": True}
        model["diffusion"] = {"model_id": "flow_matching", "sampling": "logit_normal", "weighting": "uniform"}
    if not fsdp2:
        model |= {"model_id": "qwen3"}
        flags |= {"use_torch_fsdp2": None, "use_distributed_optimizer": True}
    yaml = {"sharding_size": "auto", "sub_modules_to_wrap": case.wrap, "compile": compiled}
    yaml |= {"compile_backend": "aot_eager"} if smallest and compiled else {}  # which writes no program
    contents = {"model.json": model, "data.json": data, "tools.json": {}, "fsdp2.yaml": yaml}
    for file, content in contents.items():
        (own / file).write_text(json.dumps(content))  # which is YAML, too
    files = {"mm_model": "model.json", "mm_data": "data.json", "mm_tool": "tools.json"}
    files |= {"fsdp2_config_path": "fsdp2.yaml"} if fsdp2 else {}
    flags |= {"micro_batch_size": 1, "global_batch_size": case.micro_batches, "train_iters": 100_000}
    flags |= {"log_interval": 100_000, "distributed_backend": None, "bf16": True, **more}
    return launch_words({flag: own / file for flag, file in files.items()}, None, **flags)


def ours(
    case: Case, folder: Path, own: Path, meter: Meter, smallest: bool, *, fsdp2: bool = True, compiled: bool = False
) -> Iterator[dict[str, Any]]:
    """Our loop, from `training.train`, over packs that are prepared as the loader does."""
    from our_loop import OurLoop

    from mindspeed_mm.data.adapter import DefaultAdapter

    words = ours_words(folder, own, case, smallest, fsdp2=fsdp2, compiled=compiled)
    batches = torch.load(folder / "packed.pt", weights_only=False)
    adapter = DefaultAdapter() if case.capacity else None
    script = case.script if fsdp2 else "pretrain_vlm.py"
    loop = OurLoop(script, words, batches, 1, adapter, prepares=True)
    steps: list[Any] = []
    failure = None
    try:
        loop.train(meter.before_step, LOGGED, steps.append)
    except Exception as error:
        if not meter.is_timed:
            raise
        is_wait = meter.is_strict and "synchronizing" in str(error)
        failure = f"waits for the device at {innermost(error)}" if is_wait else said(error)
    finally:
        meter.close()
    of_block = [one.counts for one in steps[WARM : WARM + meter.timed]]
    units = sum(each.tokens if case.unit == "tokens" else each.rows for each in of_block)
    flops = sum(each.flops or 0.0 for each in of_block)
    if flops:
        (folder / "flops.json").write_text(json.dumps({"per_unit": flops / units}))
    first = steps[0].result()
    skipped = sum(one.result().skipped for one in steps[WARM : WARM + meter.timed])
    note = f"{kernel_note()}{f'; {skipped} timed steps were skipped' if skipped else ''}"
    yield figures(case, folder, meter, units, first.loss, note)
    yield watched_row(meter, failure)


def kernel_note() -> str:
    """The kernel of attention in bf16 on this device."""
    from mindspeed_mm import accelerator

    sample = torch.empty(1, 1, 1, 128, dtype=torch.bfloat16)
    return f"attention: {accelerator.current().attention_kernel(sample, sample).name}"


def watched_row(meter: Meter, failure: str | None) -> dict[str, Any]:
    """The row about waits for the device in unlogged steps."""
    if failure is None and meter.last == WARM + meter.timed + 1:
        return {"what": "unlogged steps wait for nothing", "note": "not run: torch.cuda.set_sync_debug_mode needs CUDA"}
    places = "; ".join(meter.waits) or "none"
    outcome = failure or "one step in mode “error” passed"
    return {"what": "unlogged steps wait for nothing", "note": f"{outcome}; places in mode “warn”: {places}"}


def ours_compiled(*args: Any) -> Iterator[dict[str, Any]]:
    """Ours with `compile: true`."""
    yield from ours(*args, compiled=True)


def ours_megatron(*args: Any) -> Iterator[dict[str, Any]]:
    """Ours on the Megatron backend."""
    yield from ours(*args, fsdp2=False)


# --- the HF Trainer


def trainer(
    case: Case, folder: Path, own: Path, meter: Meter, smallest: bool, *, packed: bool = False
) -> Iterator[dict[str, Any]]:
    """The HF Trainer in bf16 (autocast over float32 weights), over padded micro-batches of the same rows, or packs."""
    import transformers
    from transformers import Trainer, TrainerCallback, TrainingArguments

    architecture = json.loads((folder / "hf" / "config.json").read_text())["architectures"][0]
    attention = "flash_attention_2" if transformers.utils.is_flash_attn_2_available() else "sdpa"
    model = getattr(transformers, architecture).from_pretrained(
        folder / "hf", dtype=torch.float32, attn_implementation=attention
    )
    micros = packs_of(folder) if packed else torch.load(folder / "padded.pt", weights_only=False)
    accumulation = case.micro_batches if packed else (2 if smallest else TRAINER_MICRO_BATCHES)
    taken = [micros[number % len(micros)] for number in range((meter.last + 1) * accumulation)]
    losses: list[float] = []

    class Watch(TrainerCallback):
        done = 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if not meter.before_step(self.done):
                raise _Over
            self.done += 1

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            losses.extend([float(logs["loss"])] if "loss" in (logs or {}) else [])

    class InOrder(Trainer):
        def _get_train_sampler(self, *args: Any, **kwargs: Any) -> Any:
            return range(len(taken))

    device_is_host = meter.device.is_host
    arguments = TrainingArguments(
        output_dir=str(own),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=accumulation,
        max_steps=meter.last + 1,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        logging_first_step=True,
        logging_steps=100_000,
        save_strategy="no",
        report_to=[],
        remove_unused_columns=False,
        disable_tqdm=True,
        bf16=True,
        use_cpu=device_is_host,
        dataloader_num_workers=0,
        dataloader_pin_memory=not device_is_host,
    )
    loop = InOrder(
        model=model, args=arguments, train_dataset=taken, data_collator=lambda one: dict(one[0]), callbacks=[Watch()]
    )
    with suppress(_Over):
        loop.train()
    block = taken[WARM * accumulation : (WARM + meter.timed) * accumulation]
    units = sum(tokens_of(micro) for micro in block)
    padding = 1 - units / sum(micro["input_ids"].numel() for micro in block)
    how = "packs" if packed else f"{MICRO_ROWS} rows × {accumulation}, {padding:.0%} padding"
    yield figures(case, folder, meter, units, losses[0] if losses else None, f"{how}; attention: {attention}")


class _Over(Exception):
    """All steps are done."""


def tokens_of(micro: dict[str, torch.Tensor]) -> int:
    """Tokens of a micro-batch that are no padding."""
    return int(micro["attention_mask"].sum()) if "attention_mask" in micro else micro["input_ids"].numel()


def packs_of(folder: Path) -> list[dict[str, torch.Tensor]]:
    """Our packs as transformers takes them: position ids begin anew with each document."""
    found = []
    for batch in torch.load(folder / "packed.pt", weights_only=False):
        count = int((batch["documents"] > 0).sum())
        positions = positions_of(batch["documents"])
        one = {"input_ids": batch["input_ids"], "labels": batch["labels"], "position_ids": positions}
        found.append({key: value[:, :count] for key, value in one.items()})
    return found


def trainer_packed(*args: Any) -> Iterator[dict[str, Any]]:
    """The Trainer over our packs."""
    yield from trainer(*args, packed=True)


# --- diffusers


def plain_diffusers(case: Case, folder: Path, own: Path, meter: Meter, smallest: bool) -> Iterator[dict[str, Any]]:
    """What one would write with diffusers: autocast over float32 weights, flow matching, clipping, fused AdamW."""
    from diffusers import WanTransformer3DModel

    device = meter.device.device()
    model = WanTransformer3DModel.from_pretrained(folder / "hf").to(device).train()
    decay = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    batches = cycle(torch.load(folder / "packed.pt", weights_only=False))
    done, first = 0, None
    while meter.before_step(done):
        batch = next(batches)
        latents, states = (batch[key].to(device) for key in ("latents", "text.encoder_hidden_states"))
        noise = torch.randn_like(latents)
        sigmas = torch.sigmoid(torch.randn(len(latents), device=device))
        spread = sigmas.view(-1, 1, 1, 1, 1)
        noisy = (1 - spread) * latents + spread * noise
        with torch.autocast(device.type, dtype=torch.bfloat16):
            predicted = model(
                hidden_states=noisy, timestep=sigmas * 1000, encoder_hidden_states=states, return_dict=False
            )[0]
        loss = torch.nn.functional.mse_loss(predicted.float(), noise - latents)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        first = loss.detach() if first is None else first
        done += 1
    units = meter.timed * len(latents)
    yield figures(case, folder, meter, units, float(first), "autocast; other noise than ours")


CONTENDERS = {
    "ours": ours,
    "ours compiled": ours_compiled,
    "ours on Megatron": ours_megatron,
    "Trainer": trainer,
    "Trainer packed": trainer_packed,
    "diffusers": plain_diffusers,
}
