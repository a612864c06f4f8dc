"""Sizes and rates of a run, from the model's size, the rows' lengths and the machine's memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mindspeed_mm.tools.init.machine import Machine

#: bytes a trained parameter: weight, gradient and Adam's two moments in float32
TRAINED_BYTES = 16
#: bytes a frozen parameter on the host (float32) and on a device (bfloat16)
FROZEN_BYTES = (4, 2)
#: share of the memory that weights and optimizer may take; activations have the rest
_SHARE = 0.75
#: number of parameters below which a learning rate holds, for whole weights and for adapters
_RATES = ((50_000_000, 1e-3, 5e-3), (1_000_000_000, 5e-5, 3e-4), (None, 1e-5, 1e-4))
#: number of rows below which the rows are gone through so often
_EPOCHS = ((100, 10), (1_000, 5), (50_000, 3), (None, 1))
_STEPS_AN_EPOCH = 6
_LARGEST_BATCH = 64
_MOST_TOKENS = (2_048, 16_384)
_ROWS_FOR_VALIDATION = 200
_LARGEST_VALIDATION = 500
_STEPS_FOR_CHECKPOINTS = 500
_LARGE = 1_000_000_000
_ROWS_FOR_PACKING = 1_000
_PACK = (1_024, 4_096)
_EMPTIER = 4


@dataclass(frozen=True)
class Tuning:
    """What of the weights is trained.

    Attributes:
        is_lora: adapters alone; else all weights.
        why: the reason, with the numbers.
    """

    is_lora: bool
    why: str


@dataclass(frozen=True)
class BatchSizes:
    """Rows (or packs) of a step.

    Attributes:
        micro: of a device at once.
        whole: of an optimizer step.
        epochs: passes over the rows.
        steps_per_epoch: optimizer steps of one.
        validation: rows that are set apart; 0: too few to spare.
        validation_steps: global batches of them.
    """

    micro: int
    whole: int
    epochs: int
    steps_per_epoch: int
    validation: int
    validation_steps: int

    @property
    def steps(self) -> int:
        """Optimizer steps in all."""
        return self.steps_per_epoch * self.epochs

    @property
    def save_interval(self) -> int | None:
        """Steps between two checkpoints; None: a short run has one at its end."""
        return None if self.steps <= _STEPS_FOR_CHECKPOINTS else max(100, self.steps // 5)


def choose_tuning(parameters: int, machine: Machine, *, asked: bool, beside: int = 0) -> Tuning:
    """Choose between training all weights and adapters.

    Args:
        parameters: number of the model's weights.
        machine: over whose devices the weights are sharded.
        asked: whether adapters are asked for.
        beside: bytes of frozen encoders, which each device holds whole.
    """
    whole = TRAINED_BYTES * parameters
    frozen = FROZEN_BYTES[machine.has_devices] * parameters
    there = machine.devices * max(0, machine.memory - beside)
    sizes = f"{_memory(whole)} for weights, gradients and optimizer of {count_in_words(parameters)} parameters"
    if asked:
        return Tuning(True, f"adapters, as --lora asks; all weights would take {sizes}")
    if whole <= _SHARE * there:
        return Tuning(False, f"all weights are trained: {sizes}, and this machine has {_memory(there)}")
    fits = (
        ""
        if frozen <= _SHARE * there
        else "; even the frozen weights may not fit: see lora_quantize and offload_to_cpu"
    )
    return Tuning(
        True,
        f"adapters: training all weights takes {sizes}, and this machine has {_memory(there)}; frozen, the weights "
        f"take {_memory(frozen)}{fits}",
    )


def choose_rate(parameters: int, *, is_lora: bool) -> float:
    """Return the highest learning rate for a model of this many parameters."""
    row = next(row for row in _RATES if row[0] is None or parameters < row[0])
    return row[2] if is_lora else row[1]


def choose_pack(rows: int, longest: int, mean: float, machine: Machine) -> int | None:
    """Return the tokens of a pack, where rows are many and most are much shorter; None: they are padded.

    Args:
        rows: their number.
        longest, mean: tokens of a row.
    """
    capacity = max(_PACK[machine.has_devices], power_of_two(longest, up=True))
    return capacity if rows >= _ROWS_FOR_PACKING and mean * _EMPTIER <= capacity else None


def choose_batches(
    rows: int, longest: int, machine: Machine, *, most: int, rows_a_pack: float = 1.0, passes: int = 1
) -> BatchSizes:
    """Choose the sizes of batches.

    An epoch has about six steps at least, and a step at most about 64 rows.

    Args:
        rows: rows that can be trained on.
        longest: tokens of the longest row, or of a pack.
        machine: each of its devices takes rows of its own.
        most: tokens that a device takes at once (`tokens_at_once`).
        rows_a_pack: rows that share a row of the batch.
        passes: factor on the epochs: samples that are seen with other noise each time bear more of them.
    """
    validation = min(_LARGEST_VALIDATION, rows // 20) if rows >= _ROWS_FOR_VALIDATION else 0
    rows -= validation
    packs = max(1, round(rows / rows_a_pack))
    whole = power_of_two(max(1, min(_LARGEST_BATCH / rows_a_pack, packs // _STEPS_AN_EPOCH)))
    a_device = power_of_two(max(1, whole // machine.devices))
    micro = max(1, min(a_device, power_of_two(max(1, most // longest))))
    whole = a_device * machine.devices
    epochs = next(count for below, count in _EPOCHS if below is None or rows < below)
    steps_per_epoch, validation_steps = (max(1, round(n / rows_a_pack) // whole) for n in (rows, validation))
    return BatchSizes(micro, whole, passes * epochs, steps_per_epoch, validation, validation_steps)


def tokens_at_once(parameters: int, hidden: int, layers: int, machine: Machine, *, is_lora: bool) -> int:
    """Estimate the tokens that a device takes at once beside weights and optimizer.

    Counted are 40 values of `hidden` a token for the layer that is computed, and with recompute two for each of the
    others; half of what is left of the memory is kept for logits and media.

    Args:
        parameters: number of the model's weights.
        hidden, layers: sizes of its language model.
        is_lora: whether adapters alone are trained.
    """
    most = _MOST_TOKENS[machine.has_devices]
    if not machine.has_devices:
        return most
    held = (FROZEN_BYTES[1] if is_lora else TRAINED_BYTES) * parameters / machine.devices
    free = max(0.0, machine.memory - held) / 2
    kept = 2 * layers if recomputes(parameters, machine) else 40 * layers
    return max(256, min(most, int(free / (2 * hidden * (40 + kept)))))


def recomputes(parameters: int, machine: Machine) -> bool:
    """Whether blocks are recomputed in backward: of large models on a device, whose memory activations would fill."""
    return machine.has_devices and parameters >= _LARGE


def recompute_flags(parameters: int, machine: Machine) -> dict[str, Any]:
    """Return the flags of recompute; {} without."""
    if not recomputes(parameters, machine):
        return {}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def power_of_two(number: float, *, up: bool = False) -> int:
    """Return the nearest power of two that isn't above a number of at least 1, or isn't below it."""
    found = 1
    while found * 2 <= number:
        found *= 2
    return found * 2 if up and found < number else found


def count_in_words(number: int) -> str:
    """Return a number of parameters such as 7.62B."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _memory(size: float) -> str:
    gibibytes = size / 2**30
    return (
        f"{gibibytes:.2g} GiB"
        if 1 <= gibibytes < 10
        else f"{gibibytes:.0f} GiB"
        if gibibytes >= 10
        else (f"{size / 2**20:.2g} MiB")
    )
