"""A step over a layout of ranks with its gradients, and the same of plain transformers on each document alone."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml

from tests.support.runs import run_of

Batch = dict[str, Any]


@dataclass
class Step:
    """What a step computed.

    Attributes:
        gradients: whole, of the loss.
        metrics: of the loss function.
        evaluated: loss of the same micro-batches in evaluation.
    """

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    metrics: dict[str, float] = field(default_factory=dict)
    evaluated: float = 0.0

    def differences(self, expected: Step) -> tuple[float, float, float, str]:
        """Relative differences of loss, norm and the worst gradient from those expected, and that gradient's name."""
        assert self.gradients.keys() <= expected.gradients.keys()
        worst, name = max(
            (float((self.gradients.get(name, 0) - g).norm() / max(float(g.norm()), expected.floor(name))), name)
            for name, g in expected.gradients.items()
        )
        return _relative(self.loss, expected.loss), _relative(self.norm, expected.norm), worst, name

    def floor(self, name: str) -> float:
        """The norm that a gradient's difference is at least measured against.

        The bias of keys without rotary positions, which softmax takes away, has a gradient that is rounding only.
        """
        return (1e-5 if name.endswith("k_proj.bias") else 1e-6) * self.norm


def _relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def step_on_ranks(
    hf_dir: str,
    batches: Sequence[Batch],
    flags: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
    fsdp2: Mapping[str, Any] | None = None,
) -> Step | None:
    """Compute a step in the processes of a pool, with the backend and the callbacks of a run.

    Args:
        hf_dir: of the model.
        batches: micro-batches as a loader gives them; of n data-parallel ranks, rank i has every n-th from i on.
        flags: those of the layout.
        model, fsdp2: keys of model.json and fsdp2.yaml.

    Returns:
        None on all ranks but the first.
    """
    from mindspeed_mm.backends.fsdp2 import FSDP2Backend
    from mindspeed_mm.data.loading.counting import BatchCounts
    from mindspeed_mm.models.transformers_model import TransformersModel
    from mindspeed_mm.tasks.train.language import forward_step

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fsdp2.yaml"
        file.write_text(yaml.safe_dump({"sharding_size": "auto", **(fsdp2 or {})}))
        usual = {"seq_length": 64, "clip_grad": 0.0, "fsdp2_config_path": str(file)}
        run = run_of(world_size=dist.get_world_size(), use_torch_fsdp2=True, **usual, **flags)
    backend = FSDP2Backend()
    backend.setup(run)
    content = {"init_from_hf_path": hf_dir, **(model or {})}
    backend.build_model(lambda: TransformersModel(content), load_weights=True)
    backend.build_optimizer(backend.model, run)
    gradients: dict[str, torch.Tensor] = {}

    def keep(factor: torch.Tensor, *_: Any) -> None:
        for name, parameter in backend._root.named_parameters():
            if parameter.grad is not None:
                gradients[name] = getattr(parameter.grad, "full_tensor", lambda p=parameter: p.grad)() * factor

    backend.apply = keep  # type: ignore[method-assign]
    own = batches[backend.world.batch.rank :: backend.world.batch.size]
    total, denominator = backend.evaluate(forward_step, iter(own), len(own))
    backend.forward_backward(forward_step, iter(own), len(own))
    result = backend.step(BatchCounts(rows=len(own)), False).result()
    if dist.get_rank():
        return None
    return Step(result.loss, result.grad_norm, gradients, dict(result.metrics), total / denominator)


LossOf = Callable[[list[torch.Tensor]], torch.Tensor]


def mean_of_tokens(losses: list[torch.Tensor]) -> torch.Tensor:
    """per_token_loss."""
    return torch.cat(losses).mean()


class PlainModel:
    """A model as transformers loads it, run on each document alone."""

    def __init__(self, hf_dir: Path, documents: Sequence[Batch], **arguments: Any) -> None:
        """
        Args:
            documents: each with input_ids, labels [1, tokens] and media, and no padding.
            arguments: of the model's forward.
        """
        import transformers

        architecture = json.loads((Path(hf_dir) / "config.json").read_text())["architectures"][0]
        self.model = getattr(transformers, architecture).from_pretrained(hf_dir, dtype=torch.float32)
        with torch.device("meta"):  # from_pretrained forgets which tables the class never trains
            stated = dict(type(self.model)(self.model.config).named_parameters())
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(stated[name].requires_grad)
        self.losses: list[torch.Tensor] = []
        self.balance_losses: list[torch.Tensor] = []
        for document in documents:
            inputs = {key: value for key, value in document.items() if key != "labels"}
            output = self.model(**inputs, use_cache=False, **arguments)
            labels = document["labels"][0, 1:]
            each = F.cross_entropy(output.logits[0, :-1].float(), labels, reduction="none")
            self.losses.append(each[labels != -100])
            if "output_router_logits" in arguments:
                self.balance_losses.append(output.aux_loss)

    def step(self, loss_of: LossOf = mean_of_tokens) -> Step:
        """The loss that `loss_of` makes of the documents' token losses, and its gradients."""
        loss = loss_of(self.losses)
        names, parameters = zip(*((n, p) for n, p in self.model.named_parameters() if p.requires_grad), strict=True)
        found = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
        gradients = {
            n: torch.zeros_like(p) if g is None else g for n, p, g in zip(names, parameters, found, strict=True)
        }
        # in float32 the sum of so many squares would be off by 1e-5
        norm = torch.cat([g.flatten() for g in gradients.values()]).double().norm()
        return Step(float(loss.detach()), float(norm), gradients)


def text_documents(lengths: Sequence[int], seed: int = 0, vocabulary: int = 250) -> list[Batch]:
    """Documents of random tokens; half of the positions are targets."""
    random = torch.Generator().manual_seed(seed)
    documents = []
    for length in lengths:
        ids = torch.randint(8, vocabulary, (1, length), generator=random)
        is_target = torch.rand(1, length, generator=random) < 0.5
        documents.append({"input_ids": ids, "labels": ids.masked_fill(~is_target, -100)})
    return documents


def padded(documents: Sequence[Batch], side: str = "right") -> Batch:
    """A micro-batch of a row for each document, padded at one side."""
    longest = max(d["input_ids"].shape[1] for d in documents)

    def stacked(key: str, fill: int) -> torch.Tensor:
        missing = [longest - d["input_ids"].shape[1] for d in documents]
        pads = [(n, 0) if side == "left" else (0, n) for n in missing]
        rows = [(torch.ones_like(d["input_ids"]) if key == "attention_mask" else d[key]) for d in documents]
        return torch.cat([F.pad(row, pad, value=fill) for row, pad in zip(rows, pads, strict=True)])

    return {name: stacked(name, fill) for name, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}
