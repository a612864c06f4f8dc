"""A hand-written transformers + AdamW loop: what every layout must equal. Shares no code with the package.

One global batch is the whole data set, so row order cannot matter.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image


def rows_as_inputs(hf_dir: Path, data_file: Path) -> list[dict[str, torch.Tensor]]:
    """Each row alone, through the processor's own chat template, with labels found by scanning for its markers.

    Targets are what lies between `<|im_start|>assistant\\n` and `<|im_end|>`, that token included.
    """
    from transformers import AutoProcessor, AutoTokenizer

    loader = AutoProcessor if (Path(hf_dir) / "processor_config.json").exists() else AutoTokenizer
    processor = loader.from_pretrained(hf_dir)
    tokenizer = getattr(processor, "tokenizer", processor)
    header = tokenizer("<|im_start|>assistant\n", add_special_tokens=False).input_ids
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    inputs = []
    for row in json.loads(Path(data_file).read_text(encoding="utf-8")):
        messages, images = [], [Image.open(data_file.parent / p).convert("RGB") for p in row["images"]]
        for message in row["messages"]:
            parts: list[dict[str, Any]] = []
            for i, text in enumerate(message["content"].split("<image>")):
                parts += [{"type": "image"}] if i else []
                parts += [{"type": "text", "text": text}] if text else []
            plain = message["content"] if tokenizer is processor else parts
            messages.append({"role": message["role"], "content": plain})
        text = processor.apply_chat_template(messages, tokenize=False)
        if tokenizer is processor:
            encoded = tokenizer(text, return_tensors="pt", add_special_tokens=False)
        else:
            encoded = processor(text=[text], images=images or None, return_tensors="pt")
        ids = encoded["input_ids"][0].tolist()
        labels = [-100] * len(ids)
        position = 0
        while position < len(ids):
            if ids[position : position + len(header)] == header:
                position += len(header)
                while True:
                    labels[position] = ids[position]
                    position += 1
                    if ids[position - 1] == end:
                        break
            else:
                position += 1
        inputs.append({**encoded, "labels": torch.tensor([labels])})
    return inputs


@dataclass
class PlainRun:
    """What a hand-written loop has seen.

    Attributes:
        losses: mean token loss of each step.
        norms: norm of each step's gradient, before clipping.
        balances: load-balancing loss of each step's rows, weighted by their targets.
        gradients: parameter → its gradient in the first step, after clipping.
        weights: state dict after the last step.
        valid_loss: mean token loss over the validation rows, after the last step; None: there are none.
    """

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    balances: list[float] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    valid_loss: float | None = None


Outputs = Callable[[Any, dict[str, torch.Tensor]], tuple[torch.Tensor, torch.Tensor]]
"""(model, inputs of a row) → logits [n, vocabulary] and labels [n]."""


def train_plainly(
    hf_dir: Path,
    inputs: list[dict[str, torch.Tensor]],
    steps: int,
    *,
    rows_of: Callable[[int], list[int]] | None = None,
    valid: Sequence[int] = (),
    lr: float,
    clip: float,
    coefficient: float = 0.0,
    outputs: Outputs | None = None,
    frozen: Callable[[str], bool] = lambda name: False,
    model: Any = None,
) -> PlainRun:
    """Train with SGD, each row alone; the loss is the mean over all target tokens of a step.

    Args:
        inputs: of each row, with labels.
        rows_of: step, from 0 → numbers of its rows; None: all rows in every step.
        valid: numbers of the validation rows.
        coefficient: of transformers' load-balancing loss; each row's weighs what its targets do.
        outputs: None: those of a causal model.
        frozen: parameter name → not trained.
        model: trained in the place of the directory's, as it is; `frozen` says nothing of it.
    """
    model = load_plain(hf_dir, frozen) if model is None else model
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, found = torch.optim.SGD(trained.values(), lr=lr), PlainRun()
    for step in range(steps):
        rows, balances = [], []
        for number in range(len(inputs)) if rows_of is None else rows_of(step):
            losses, balance = row_losses(model, inputs[number], outputs, has_balance=coefficient > 0)
            rows.append(losses)
            balances.append(len(losses) * balance)
        tokens = torch.cat(rows)
        loss, balanced = tokens.mean(), sum(balances, torch.zeros(())) / len(tokens)
        optimizer.zero_grad()
        (loss + coefficient * balanced).backward()
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(trained.values(), clip)))
        found.losses.append(float(loss.detach()))
        found.balances.append(float(balanced.detach()))
        if step == 0:
            found.gradients = {name: p.grad.clone() for name, p in trained.items() if p.grad is not None}
        optimizer.step()
    if valid:
        with torch.no_grad():
            model.eval()
            found.valid_loss = float(torch.cat([row_losses(model, inputs[n], outputs)[0] for n in valid]).mean())
    found.weights = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return found


def load_plain(
    hf_dir: Path, frozen: Callable[[str], bool] = lambda name: False, dtype: torch.dtype = torch.float32, **how: Any
) -> Any:
    """The model of a directory as transformers loads it in `dtype`, in training mode; `how` goes to from_pretrained."""
    import transformers

    architecture = json.loads((Path(hf_dir) / "config.json").read_text())["architectures"][0]
    model = getattr(transformers, architecture).from_pretrained(hf_dir, dtype=dtype, **how)
    model.train()
    with torch.device("meta"):  # from_pretrained forgets which tables the class never trains
        stated = dict(type(model)(model.config).named_parameters())
    for name, param in model.named_parameters():
        param.requires_grad_(stated[name].requires_grad and not frozen(name))
    return model


def row_losses(
    model: Any, batch: dict[str, torch.Tensor], outputs: Outputs | None, has_balance: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each target token of a row, and the row's load-balancing loss (0 unless it is asked for)."""
    balance = torch.zeros(())
    if outputs is None:
        features = {k: v for k, v in batch.items() if k != "labels"}
        output = model(**features, **({"output_router_logits": True} if has_balance else {}))
        balance = output.aux_loss if has_balance else balance
        logits, targets = output.logits[0, :-1].float(), batch["labels"][0, 1:]
    else:
        logits, targets = outputs(model, batch)
        logits = logits.float()
    return torch.nn.functional.cross_entropy(logits, targets, reduction="none")[targets != -100], balance


def train_reference(
    hf_dir: Path,
    inputs: list[dict[str, torch.Tensor]],
    steps: int,
    *,
    rows_of: Callable[[int], list[int]] | None = None,
    frozen: Callable[[str], bool] = lambda name: False,
    lr: float = 1e-3,
    weight_decay: float = 0.1,
    clip: float = 1.0,
    loss_of: Callable[[list[tuple[torch.Tensor, torch.Tensor]]], torch.Tensor] | None = None,
    outputs: Outputs | None = None,
    model: Any = None,
) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    """Train on all rows at once for `steps` steps; returns losses, gradient norms before clipping, final weights.

    Args:
        rows_of: step, from 0 → numbers of its rows; None: all rows in every step.
        frozen: parameter name → not trained.
        loss_of: rows' (token losses, row number) → the step's loss; None: mean over all target tokens.
        outputs: (model, inputs of a row) → logits [n, vocabulary] and labels [n]; None: those of a causal model.
        model: trained in the place of the directory's, as it is; `frozen` says nothing of it.
    """
    model = load_plain(hf_dir, frozen) if model is None else model
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses, norms = [], []
    for step in range(steps):
        rows = []
        for number in range(len(inputs)) if rows_of is None else rows_of(step):
            rows.append((row_losses(model, inputs[number], outputs)[0], number))
        loss = torch.cat([r for r, _ in rows]).mean() if loss_of is None else loss_of([r for r, _ in rows])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trained, clip)))
        losses.append(float(loss.detach()))
        optimizer.step()
    return losses, norms, {k: v.detach().clone() for k, v in model.state_dict().items()}
