"""How far a step in bf16 is from float32: ours, and plain transformers' or diffusers' own.

Each distance is that of one row's loss or gradient, on weights drawn for the occasion. A row's rounding is as much
noise as error, so what is compared is a mean over many rows and draws of weights:

- gradients: ‖found − float32‖ ÷ ‖float32‖ over all parameters; the ratio is the geometric mean of the rows' ratios.
  Distances of mixtures of experts have a long tail (a token that rounding sends to another expert), which would decide
  an arithmetic mean.
- losses: their error may be next to zero by chance, so the ratio is that of the root mean squares over all rows.

Rows share the weights of a draw, and often their first tokens, so that a token that goes to another expert does so in
all of them: standard errors are those of means over whole draws. Where both forward passes round the same values, few
draws tell the ratio; where they don't, the errors of losses are independent and `draws_of` says how many it takes.

Plain is `from_pretrained(dtype=torch.bfloat16)`: weights, activations and each row's gradient are in bf16, but for what
the library itself keeps in float32; logits are float32 in the loss. That is what FSDP2 and Megatron-core compute in
bf16 over float32 master weights. Sums over rows, which we keep in float32, are no part of it.

Tensor-parallel ranks round their parts of a row-parallel layer's product before the parts are summed, in any framework.
What that costs is a property of the split, so such runs are compared with plain transformers under its own tensor
parallelism (`DistributedConfig(tp_plan="auto")`) over as many ranks as well: `split_errors`.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from transformers.distributed import DistributedConfig

from tests.support.family_case import FamilyCase, data_keys
from tests.support.gradients import run_for_gradients, run_for_megatron_gradients
from tests.support.launch import launch_flags, metrics_of, write_run_files
from tests.support.predictors import Case
from tests.support.reference import Outputs, load_plain, row_losses
from tests.support.workers import RankPool

#: the families that Megatron-core's modules are there for
ON_MEGATRON = ("qwen2", "qwen3", "qwen2_5_vl")
#: whose layers transformers' own plan of tensor parallelism splits as ours does
SPLIT_ALIKE = (
    "internvl",
    "llama",
    "llava_onevision",
    "qwen2",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3",
    "qwen3_asr",
)
#: whose ratio has a long tail: which experts a token goes to depends on the last bit
BY_LUCK = ("deepseek_v3", "gpt_oss", "kimi_k25")
#: whose table of positions is a buffer: from_pretrained rounds it, and ours stays in float32, so that losses' errors
#: are as independent as those of two other samples
ROUNDED_TABLE = ("sd3-3.5", "sd3-t2i")
#: what diffusers' pipelines give to a transformer in float32 whatever its dtype is
_EXACT = ("timestep", "guidance", "img_ids", "txt_ids", "image_rotary_emb")
#: whose pipelines cast timesteps as well, and whose transformers don't do it themselves
_CASTS_TIMESTEPS = ("hunyuanvideo15",)


def draws_of(name: str) -> int:
    """Return the number of draws of weights, of 4 to 8 rows each, by which the ratios' standard errors are at most
    0.05; for the losses of mixtures of experts with a long tail, 0.15."""
    return 60 if name in (*BY_LUCK, *ROUNDED_TABLE) else 4


class Row(NamedTuple):
    """Mean loss of a row, and its gradient by the parameters' names."""

    loss: float
    gradients: Mapping[str, torch.Tensor]


@dataclass
class Errors:
    """Distances from float32 of all rows and draws: of gradients, relative L2; of losses, relative, with signs.

    Attributes:
        draws: number of each row's draw of weights.
    """

    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    our_losses: list[float] = field(default_factory=list)
    plain_losses: list[float] = field(default_factory=list)
    draws: list[int] = field(default_factory=list)

    def add(self, draw: int, ours: Row, plain: Row, exact: Row) -> None:
        """Add a row of a draw; what has a gradient in one and not in the other has one of zeros."""
        for name in ours.gradients.keys() ^ exact.gradients.keys():
            assert not {**ours.gradients, **exact.gradients}[name].any(), name
        self.draws.append(draw)
        self.ours.append(distance(ours.gradients, exact.gradients))
        self.plain.append(distance(plain.gradients, exact.gradients))
        self.our_losses.append(ours.loss / exact.loss - 1)
        self.plain_losses.append(plain.loss / exact.loss - 1)

    @property
    def ratio(self) -> float:
        """Error of our gradients ÷ that of plain ones."""
        return math.exp(statistics.fmean(self._logarithms))

    @property
    def spread(self) -> float:
        """Standard error of `ratio`; NaN of a single draw."""
        return self.ratio * self._standard_error(self._logarithms)

    @property
    def median(self) -> float:
        """Median of the rows' ratios, which few rows in a tail don't move."""
        return math.exp(statistics.median(self._logarithms))

    @property
    def loss_ratio(self) -> float:
        """Error of our losses ÷ that of plain ones."""
        return root_mean_square(self.our_losses) / root_mean_square(self.plain_losses)

    @property
    def loss_spread(self) -> float:
        """Standard error of `loss_ratio`, to first order; NaN of a single draw."""
        ours, plain = root_mean_square(self.our_losses) ** 2, root_mean_square(self.plain_losses) ** 2
        pairs = zip(self.our_losses, self.plain_losses, strict=True)
        return self.loss_ratio * self._standard_error([(a * a / ours - b * b / plain) / 2 for a, b in pairs])

    def _standard_error(self, values: list[float]) -> float:
        """Of the mean of the rows' values, by the means of the draws."""
        of_draws: dict[int, list[float]] = {}
        for draw, value in zip(self.draws, values, strict=True):
            of_draws.setdefault(draw, []).append(value)
        means = [statistics.fmean(found) for found in of_draws.values()]
        return statistics.stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.nan

    @property
    def _logarithms(self) -> list[float]:
        return [math.log(ours / plain) for ours, plain in zip(self.ours, self.plain, strict=True)]


def root_mean_square(values: Iterable[float]) -> float:
    """The square root of the mean of the squares."""
    return math.sqrt(statistics.fmean(value * value for value in values))


def distance(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """‖found − expected‖ ÷ ‖expected‖ over all parameters; a gradient that is absent is zero."""
    zero = torch.zeros(())
    difference = norm = 0.0
    for name in expected.keys() | found.keys():
        one, other = found.get(name, zero).double(), expected.get(name, zero).double()
        difference += float((one - other).square().sum())
        norm += float(other.square().sum())
    return math.sqrt(difference / norm)


# --- transformers


def family_errors(
    case: FamilyCase, draws: int, pool: RankPool, folder: Path, *, megatron: bool = False, **flags: Any
) -> Errors:
    """Errors of a family's rows, over several draws of weights.

    Args:
        case: its directory gets other weights.
        pool: one process, of the backend's kind; of Megatron-core, one tensor-parallel group.
        folder: runs are written here.
        megatron: on Megatron-core, else on FSDP2.
        flags: further ones of the runs.
    """
    errors = Errors()
    for draw, inputs, exact, plain in _plain_draws(case, draws):
        for number, ours in our_rows(case, pool, folder / f"draw{draw}", len(inputs), flags, megatron=megatron).items():
            errors.add(draw, ours, plain[number], exact[number])
    return errors


class SplitErrors(NamedTuple):
    """Errors of tensor-parallel ranks.

    Attributes:
        plain: of plain transformers under its own tensor parallelism, against those of plain on one process.
        ours: ours against those of plain on one process.
        same_split: ours against those of plain under its own tensor parallelism.
    """

    plain: Errors
    ours: Errors
    same_split: Errors


def split_errors(
    case: FamilyCase,
    draws: int,
    pool: RankPool,
    plain_pool: RankPool,
    folder: Path,
    *,
    megatron: bool = False,
    **flags: Any,
) -> SplitErrors:
    """Errors of a family's rows where all ranks of a pool are tensor-parallel; see `family_errors`.

    Args:
        plain_pool: as many processes without Megatron-core, for plain transformers.
    """
    errors, ranks = SplitErrors(Errors(), Errors(), Errors()), pool.world_size
    flags = {"tensor_model_parallel_size": ranks, **flags}
    for draw, inputs, exact, plain in _plain_draws(case, draws):
        split = plain_pool.run(
            plain_rows, case.hf_dir, inputs, case.family.outputs, torch.bfloat16, ranks, timeout=180
        )[0]
        for number, ours in our_rows(case, pool, folder / f"draw{draw}", len(inputs), flags, megatron=megatron).items():
            errors.plain.add(draw, split[number], plain[number], exact[number])
            errors.ours.add(draw, ours, plain[number], exact[number])
            errors.same_split.add(draw, ours, split[number], exact[number])
    return errors


def _plain_draws(
    case: FamilyCase, draws: int
) -> Iterator[tuple[int, list[dict[str, torch.Tensor]], list[Row], list[Row]]]:
    """Give the case's directory one draw of weights after the other: its number, inputs, rows in float32 and bf16."""
    inputs, outputs = case.inputs(), case.family.outputs
    for draw in range(draws):
        draw_weights(case.hf_dir, draw)
        exact, plain = (plain_rows(case.hf_dir, inputs, outputs, dtype) for dtype in (torch.float32, torch.bfloat16))
        yield draw, inputs, exact, plain


def draw_weights(hf_dir: Path, seed: int) -> None:
    """Shuffle the elements of each weight of a directory; those of biases and norms that are all alike first differ."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        if tensor.eq(tensor.flatten()[0]).all():
            tensor = tensor + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        return tensor.flatten()[torch.randperm(tensor.numel(), generator=generator)].view_as(tensor)

    for file in sorted(hf_dir.glob("*.safetensors")):
        save_file({n: drawn(t) for n, t in sorted(load_file(file).items())}, file, metadata={"format": "pt"})


def plain_rows(
    hf_dir: Path,
    inputs: list[dict[str, torch.Tensor]],
    outputs: Outputs | None,
    dtype: torch.dtype,
    ranks: int = 1,
    change: Callable[[torch.nn.Module], object] = lambda model: None,
) -> list[Row]:
    """Each row alone, by plain transformers; its floating-point inputs are cast, as `BatchFeature.to` does.

    Args:
        ranks: number of tensor-parallel ranks, by transformers' own plan; each of them calls this.
        change: changes the model in place.
    """
    split = {"distributed_config": DistributedConfig(tp_size=ranks, tp_plan="auto")} if ranks > 1 else {}
    model, rows = load_plain(hf_dir, dtype=dtype, **split), []
    change(model)
    for row in inputs:
        model.zero_grad(set_to_none=True)
        cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in row.items()}
        loss = row_losses(model, cast, outputs)[0].mean()
        loss.backward()
        rows.append(Row(float(loss.detach()), gradients_of(model)))
    return rows


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A copy of each gradient, whole, in float32."""
    from torch.distributed.tensor import DTensor

    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in found.items()}
    return {name: gradient.detach().float().clone() for name, gradient in whole.items()}


def our_rows(
    case: FamilyCase,
    pool: RankPool,
    folder: Path,
    rows: int,
    further: Mapping[str, Any] | None = None,
    *,
    megatron: bool = False,
    **keys: Any,
) -> dict[int, Row]:
    """Each row alone, a step a row, by the entry script in bf16, which trains nothing: row's number → its results.

    Args:
        further: flags.
        keys: of fsdp2.yaml.
    """
    model: dict[str, Any] = dict(case.family.model)
    flags: dict[str, Any] = {**case.family.flags, "micro_batch_size": 1, "global_batch_size": 1, "train_iters": rows}
    flags |= {"lr": 0, "weight_decay": 0, "clip_grad": 0, "save": folder / "run", "log_row_ids": True}
    flags |= {"no_save_optim": True, "no_save_rng": True, "bf16": True}
    if megatron:
        model |= {"model_id": case.name, "freeze_vision_model": False}
        flags |= {"use_torch_fsdp2": False, "fsdp2_config_path": None, "ckpt_format": None, "seq_length": 512}
    flags |= further or {}
    data = {**data_keys(case.family), "dataloader_param.shuffle": False}
    fsdp2 = {"sub_modules_to_wrap": list(case.family.wrap), **keys}
    files = write_run_files(folder / "files", case.hf_dir, case.data, model=model, data=data, fsdp2=fsdp2)
    words = launch_flags(files, **flags)
    if megatron:
        steps = pool.run(run_for_megatron_gradients, words, "pretrain_vlm.py", timeout=180)[0]
    else:
        steps = pool.run(run_for_gradients, words, timeout=180)[0].steps
    lines = (folder / "run/rows/rank0.jsonl").read_text().splitlines()
    numbers = [json.loads(line)["rows"][0] for line in lines]
    losses, _ = metrics_of(folder / "run")
    return {number: Row(loss, step) for number, loss, step in zip(numbers, losses, steps, strict=True)}


# --- diffusers


def predictor_errors(
    name: str, case: Case, draws: int, folder: Path, rows: int = 4, *, keeps_buffers: bool = False
) -> Errors:
    """Errors of a generation family's samples, over several draws of weights; to be run in a process of a pool.

    Args:
        rows: of a draw.
        keeps_buffers: plain has its buffers in float32, as ours has them.
    """
    import diffusers

    from mindspeed_mm.models.generation.sora_model import SoRAModel

    errors = Errors()
    config = folder / "fsdp2.yaml"
    config.write_text("sharding_size: auto\nparam_dtype: bf16\nreduce_dtype: fp32\n")
    for draw in range(draws):
        torch.manual_seed(draw)
        ours = SoRAModel(case.model_json(name))
        with torch.no_grad():
            for parameter in ours.predictor.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))  # some begin as zeros
        model_class = getattr(diffusers, ours.family.model_class_name)
        exact = model_class(**case.config)
        exact.load_state_dict(ours.predictor.state_dict())
        exact.save_pretrained(folder / f"draw{draw}")
        low = model_class.from_pretrained(folder / f"draw{draw}", torch_dtype=torch.bfloat16)
        if keeps_buffers:
            for path, buffer in exact.named_buffers():
                module, _, own = path.rpartition(".")
                low.get_submodule(module).register_buffer(own, buffer)
        ours.fully_shard(fsdp2_config_path=str(config))
        for row in range(rows):
            batch = ours.prepare(case.batch([rows * draw + row]))
            output = ours(**batch)
            found = _backward(ours.predictor, output["loss"] / output["denominator"])
            inputs = {key: batch[key] for key in ("latents", "noise", "draws", "text", "conditions")}
            plain, expected = (
                _backward(model, case.plain(_Cast(model.train(), name), **inputs)) for model in (low, exact)
            )
            errors.add(draw, found, plain, expected)
    return errors


def _backward(model: torch.nn.Module, loss: torch.Tensor) -> Row:
    loss.backward()
    row = Row(float(loss.detach()), gradients_of(model))
    model.zero_grad(set_to_none=True)
    return row


class _Cast:
    """A diffusers transformer that is called as its pipeline calls it: inputs are cast to its dtype."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._exact = tuple(key for key in _EXACT if key != "timestep" or name not in _CASTS_TIMESTEPS)

    def __call__(self, **inputs: Any) -> Any:
        cast = {
            key: value.to(self._model.dtype)
            if isinstance(value, torch.Tensor) and value.is_floating_point() and key not in self._exact
            else value
            for key, value in inputs.items()
        }
        output = self._model(**cast)
        # what follows the transformer is no part of the comparison
        if isinstance(output, tuple):
            return (output[0].float(), *output[1:])
        output.sample = output.sample.float()
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)
