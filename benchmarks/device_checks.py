"""What the benchmark on a device checks: losses against plain transformers, and kernels of attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from device_cases import TEXT, Case, make_rows_and_packs, make_tokenizer, save_random, sizes
from device_contenders import ours_words, said

STEPS = 3
LEARNING_RATE = 1e-4


def make_parity(folder: Path, device: torch.device, smallest: bool) -> None:
    """Qwen3 of 4 layers with float32 weights, and a pack of rows for each step."""
    from mindspeed_mm.tools.tiny_models import qwen3_config

    text = sizes(512, 1536, 4, 8, 4, smallest) | {"vocab_size": 384 if smallest else 4096}
    tokenizer = make_tokenizer(folder / "hf")
    config = qwen3_config(tokenizer, text=text, tie_word_embeddings=False)
    save_random(config, tokenizer, folder / "hf", device, torch.float32)
    make_rows_and_packs(folder, PARITY.pack_length(smallest), STEPS, smallest)


PARITY = Case(make_parity, TEXT, micro_batches=1, capacity=2048)


def device_line() -> str:
    """The device and its libraries."""
    from mindspeed_mm import accelerator

    device = accelerator.current()
    line = f"{device.model_name()}, collectives by {device.collective_backend}"
    if device.name == "cuda":
        memory = torch.cuda.get_device_properties(device.device()).total_memory
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        line += f" {nccl}, {memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    return line


def parity(folder: Path, smallest: bool, *, fsdp2: bool, compiled: Sequence[bool]) -> Iterator[dict[str, Any]]:
    """Losses of the first steps of ours against plain transformers' on the same weights and rows.

    Args:
        fsdp2: on FSDP2, else on Megatron-core.
        compiled: without `compile: true`, with it, or both.
    """
    from mindspeed_mm import accelerator

    device = accelerator.current().device()
    folder.mkdir(exist_ok=True)
    make_parity(folder, device, smallest)
    packs = torch.load(folder / "packed.pt", weights_only=False)
    plain = {dtype: plain_losses(folder / "hf", packs, dtype, device) for dtype in (torch.float32, torch.bfloat16)}
    exact = plain[torch.float32]
    for is_compiled in compiled:
        for dtype, expected in plain.items():
            name = str(dtype).removeprefix("torch.")
            what = f"{name}{', compiled' if is_compiled else ''}: losses of {STEPS} steps"
            own = folder / f"{name}{is_compiled}"
            own.mkdir()
            try:
                found = our_losses(folder, own, packs, smallest, dtype, fsdp2=fsdp2, compiled=is_compiled)
            except Exception as error:  # the other precisions are still to be compared
                yield {"what": what, "note": f"not run: {said(error)}"}
                continue
            note = f"largest relative difference from plain transformers' {largest(found, expected):.1e}"
            if dtype is not torch.float32:
                note += f"; from its float32 ours {largest(found, exact):.1e}, its own {largest(expected, exact):.1e}"
            yield {"what": what, "note": note, "loss": found[0]}


def largest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def documents_of(pack: dict[str, Any]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Ids and labels [1, tokens] of each document of a pack."""
    numbers = pack["documents"][0]
    for number in numbers.unique_consecutive().tolist():
        if number:
            chosen = numbers == number
            yield pack["input_ids"][:, chosen], pack["labels"][:, chosen]


def plain_losses(
    hf_dir: Path, packs: Sequence[dict[str, Any]], dtype: torch.dtype, device: torch.device
) -> list[float]:
    """Losses of a plain loop over the documents, one after the other: exact token mean, clipping, AdamW in float32.

    Args:
        dtype: of weights and activations; if it isn't float32, these are a copy of float32 weights, made in each step.
    """
    from transformers import AutoModelForCausalLM

    master, model = (
        AutoModelForCausalLM.from_pretrained(hf_dir, dtype=each).to(device).train() for each in (torch.float32, dtype)
    )
    decay = [p for p in master.parameters() if p.dim() > 1]
    plain = [p for p in master.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95))
    losses = []
    for pack in packs:
        targets = int((pack["labels"][:, 1:] != -100).sum())
        with torch.no_grad():
            for copy, own in zip(model.parameters(), master.parameters(), strict=True):
                copy.copy_(own)
        total = 0.0
        for ids, labels in documents_of(pack):
            logits = model(input_ids=ids.to(device), use_cache=False).logits[0, :-1].float()
            loss = F.cross_entropy(logits, labels[0, 1:].to(device), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        for copy, own in zip(model.parameters(), master.parameters(), strict=True):
            own.grad, copy.grad = copy.grad.float(), None
        torch.nn.utils.clip_grad_norm_(master.parameters(), 1.0)
        optimizer.step()
        losses.append(total)
    return losses


def our_losses(
    folder: Path,
    own: Path,
    packs: list[dict[str, Any]],
    smallest: bool,
    dtype: torch.dtype,
    *,
    fsdp2: bool,
    compiled: bool,
) -> list[float]:
    """Losses of our loop over the packs."""
    from our_loop import OurLoop

    bf16 = dtype is torch.bfloat16
    words = ours_words(folder, own, PARITY, smallest, fsdp2=fsdp2, compiled=compiled, bf16=bf16, lr=LEARNING_RATE)
    loop = OurLoop("pretrain_transformers.py" if fsdp2 else "pretrain_vlm.py", words, packs, 1, prepares=True)
    losses: list[float] = []
    loop.train(lambda done: done < STEPS, after_step=lambda pending: losses.append(pending.result().loss))
    return losses


# --- attention


class _Shape(NamedTuple):
    """What queries see: their document's keys up to them, within a window, or all of them."""

    what: str
    is_causal: bool
    window: int | None


_SHAPES = (
    _Shape("causal", True, None),
    _Shape("causal, window of {window}", True, 256),
    _Shape("not causal", False, None),
)


def attention(smallest: bool) -> Iterator[dict[str, Any]]:
    """Each kernel of this device against plain float32, over packed documents: output and gradients."""
    from mindspeed_mm import accelerator
    from mindspeed_mm.accelerator.attention import Documents, document_attention
    from mindspeed_mm.accelerator.attention.table import attention_table

    device = accelerator.current()
    chosen = [f"{line.use} ({line.dtypes}): {line.kernel}" for line in attention_table(device)]
    left = [f"{name} not, {reason}" for name, reason in device.kernels_not_taken().items()]
    yield {"what": "chosen", "note": "; ".join([*chosen, *left])}
    lengths = (70, 1, 33, 24) if smallest else (1100, 1, 700, 247)
    heads, groups, size = (4, 2, 16) if smallest else (16, 4, 128)
    documents = Documents.in_one_row(lengths)
    for name, kernel, dtype in kernels(device, size):
        for what, is_causal, window in _SHAPES:
            window = window and (16 if smallest else window)
            torch.manual_seed(0)
            shapes = [(1, count, sum(lengths), size) for count in (heads, groups, groups, heads)]
            given = [torch.randn(shape).to(dtype) for shape in shapes]  # on the host: the same on every device
            query, key, value, of_out = (tensor.to(device.device()) for tensor in given)
            how = {"scale": size**-0.5, "is_causal": is_causal, "window": window}

            def run(q: Any, k: Any, v: Any, kernel: Any = kernel, how: Any = how) -> torch.Tensor:
                return document_attention(kernel, q, k, v, documents, **how).transpose(1, 2)

            row = {"what": f"{name}, {str(dtype).removeprefix('torch.')}, {what.format(window=window)}"}
            try:
                found = output_and_gradients(run, query, key, value, of_out)
                seen = visible(lengths, is_causal, window, device.device())
                expected = output_and_gradients(plain_attention(seen, how["scale"]), query, key, value, of_out)
            except Exception as error:  # the other kernels are still to be compared
                yield {**row, "note": f"not run: {said(error)}"}
                continue
            apart = [f"{distance(one, other):.1e}" for one, other in zip(found, expected, strict=True)]
            yield {**row, "note": f"from plain float32: output {apart[0]}; gradients of q, k, v {', '.join(apart[1:])}"}


def kernels(device: Any, size: int) -> Iterator[tuple[str, Any, torch.dtype]]:
    """Yield (name, kernel, dtype) of this device: for each dtype its own choice, and what that takes the place of."""
    from mindspeed_mm.accelerator.attention import PlainAttention
    from mindspeed_mm.accelerator.attention.cuda import CUDAFlashAttention
    from mindspeed_mm.accelerator.attention.kernel import PaddedHeads

    if device.name == "cuda":  # before FlashAttention-3 takes its place, for the whole process
        kernel = CUDAFlashAttention()
        yield kernel.name, PaddedHeads(kernel, multiple=8), torch.bfloat16
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sample = torch.empty(1, 1, 1, size, dtype=dtype)
        kernel = device.attention_kernel(sample, sample)
        name = "PyTorch's own choice" if isinstance(kernel, PlainAttention) else kernel.name
        if device.name != "cuda" or (name, dtype) != (CUDAFlashAttention.name, torch.bfloat16):
            yield name, kernel, dtype
    yield "PyTorch's own choice", PlainAttention(), torch.bfloat16


def visible(lengths: Sequence[int], is_causal: bool, window: int | None, device: torch.device) -> torch.Tensor:
    """Which key a query sees, [tokens, tokens] bool."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    places = torch.arange(len(numbers))
    seen = numbers[:, None] == numbers[None, :]
    distance = places[:, None] - places[None, :]
    if is_causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    return seen.to(device)


def plain_attention(seen: torch.Tensor, scale: float) -> Callable[..., torch.Tensor]:
    """Attention by the formula, in float32: softmax of scaled scores, with a mask."""

    def run(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        times = query.shape[1] // key.shape[1]
        key, value = (tensor.repeat_interleave(times, dim=1) for tensor in (key, value))
        scores = query.float() @ key.float().mT * scale
        return scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.float()

    return run


def output_and_gradients(run: Callable[..., torch.Tensor], *given: torch.Tensor) -> list[torch.Tensor]:
    """The output for query, key, value, and their gradients for the last tensor as gradient of the output."""
    inputs = [tensor.detach().clone().requires_grad_() for tensor in given[:3]]
    out = run(*inputs)
    out.backward(given[3].to(out.dtype))
    return [out.detach(), *(tensor.grad for tensor in inputs if tensor.grad is not None)]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ ÷ ‖expected‖."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
