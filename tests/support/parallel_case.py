"""A case of the acceptance table: a model's run in a layout, beside one process and beside a hand-written loop."""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.captured import captured, run_captured
from tests.support.family_case import FamilyCase, data_keys
from tests.support.launch import launch_flags, write_run_files
from tests.support.parallel_models import Layout, Model
from tests.support.reference import PlainRun, train_plainly

STEPS, LEARNING_RATE, CLIP = 3, 0.3, 1.0
#: of the data file; a number that the usual layouts don't divide
VALID = (0, 2, 3, 5, 6)
FORMS = ("padded", "packed")
LOSS, NORM, GRADIENT, WEIGHT = 1e-6, 1e-5, 1e-5, 1e-5
#: a pattern that no name has
NOTHING = r"(?!)"
#: a gradient's own norm counts from this share of the whole gradient's on
SMALLEST_SHARE = 1e-6


@dataclass
class Found:
    """What a run has written and kept."""

    losses: list[float]
    norms: list[float]
    balances: list[float]
    valid_loss: float
    counts: list[tuple[Any, ...]]
    rows: list[list[int]]
    gradients: dict[str, torch.Tensor]
    weights: dict[str, torch.Tensor]

    @classmethod
    def read(cls, folder: Path, processes: int) -> Found:
        """Read a run folder that `run_captured` has filled."""
        records = read_metrics(folder / "metrics.jsonl")
        steps, (last,) = [r for r in records if "loss" in r], [r for r in records if "eval_loss" in r]
        rows: dict[int, list[int]] = {}
        for file in sorted((folder / "rows").iterdir()):
            for line in map(json.loads, file.read_text(encoding="utf-8").splitlines()):
                rows[line["iteration"]] = sorted([*rows.get(line["iteration"], []), *line["rows"]])
        return cls(
            [r["loss"] for r in steps],
            [r["grad_norm"] for r in steps],
            [r.get("router_aux_loss", 0.0) for r in steps],
            last["eval_loss"],
            [_counts(r, processes) for r in steps],
            [rows[number] for number in sorted(rows)],
            captured(folder, "gradients"),
            captured(folder, "weights"),
        )


def _counts(record: dict[str, Any], processes: int) -> tuple[Any, ...]:
    """Samples, tokens, rows left out, media, FLOPs, and the load of experts, of a step."""
    seconds = record["step_ms"] / 1000
    media = {kind: round(rate * seconds) for kind, rate in record["media_per_second"].items()}
    flops = round((record["tflops_per_device"] or 0.0) * 1e12 * seconds * processes)
    whole = ("consumed_samples", "consumed_tokens", "rows_left_out", "skipped_iterations", "nan_iterations")
    load = tuple(record.get(name) for name in ("expert_imbalance", "dead_experts"))
    return (*(record[name] for name in whole), tuple(sorted(media.items())), flops, *load)


@dataclass(frozen=True)
class Limits:
    """What relative differences may be; by default those of sums in float32 in another order."""

    loss: float = LOSS
    norm: float = NORM
    gradient: float = GRADIENT
    weight: float = WEIGHT


@dataclass
class Differences:
    """Largest relative differences of a run from what it should equal.

    Attributes:
        worst: name of the parameter whose gradient differs most.
    """

    loss: float
    norm: float
    gradient: float
    worst: str
    weight: float

    def problems(self, limits: Limits = Limits()) -> list[str]:
        """What is beyond the limits."""
        found = [
            ("loss", self.loss, limits.loss),
            ("norm", self.norm, limits.norm),
            (f"gradient of {self.worst}", self.gradient, limits.gradient),
            ("weight after the last step", self.weight, limits.weight),
        ]
        return [f"{name}: {value:.2g}" for name, value, limit in found if not value <= limit]


def differences(found: Found, expected: Found | PlainRun) -> Differences:
    """Compare losses (those of the router and of the validation rows too), norms, gradients and weights."""
    assert len(found.losses) == len(expected.losses) == STEPS
    losses = itertools.chain(
        zip(found.losses, expected.losses, strict=True),
        zip(found.balances, expected.balances, strict=True),
        [(found.valid_loss, expected.valid_loss)],
    )
    total = math.sqrt(sum(float(g.norm()) ** 2 for g in expected.gradients.values()))
    gradients = {
        name: _distance(found.gradients.get(name), expected.gradients.get(name), SMALLEST_SHARE * total)
        for name in found.gradients.keys() | expected.gradients.keys()
    }
    worst = max(gradients, key=lambda name: gradients[name])
    assert found.weights.keys() <= expected.weights.keys()
    weights = [_distance(tensor, expected.weights[name], 1e-12) for name, tensor in found.weights.items()]
    return Differences(
        max(abs(a - b) / (abs(b) or 1.0) for a, b in losses),
        max(abs(a - b) / abs(b) for a, b in zip(found.norms, expected.norms, strict=True)),
        gradients[worst],
        worst,
        max(weights),
    )


def _distance(found: torch.Tensor | None, expected: torch.Tensor | None, least: float) -> float:
    """Norm of the difference over that of `expected`, at least `least`; None: zeros."""
    if found is None or expected is None:
        (present,) = [tensor for tensor in (found, expected) if tensor is not None]
        return float(present.double().norm()) / least
    assert found.shape == expected.shape
    expected = expected.double()
    return float((found.double() - expected).norm()) / max(float(expected.norm()), least)


class ParallelCase:
    """A model with its rows, and its runs."""

    def __init__(self, name: str, model: Model, folder: Path, pools: dict[int, Any]) -> None:
        self.model, self.folder, self._pools = model, folder, pools
        self.family = FamilyCase(name, folder, model.family)
        rows = json.loads(self.family.data.read_text(encoding="utf-8"))
        self._valid = self.family.data.with_name("valid.json")
        self._valid.write_text(json.dumps([rows[number] for number in VALID]), encoding="utf-8")
        lengths = [len(sample["input_ids"]) for sample in self.family.samples]
        assert any(length % 2 for length in lengths)
        self._pack_length = max(lengths) + min(lengths)

    def words(
        self,
        layout: Layout,
        form: str,
        folder: Path,
        *,
        data: Any = None,
        model: Any = None,
        fsdp2: Any = None,
        **flags: Any,
    ) -> list[str]:
        """The launch of a layout.

        Args:
            data, model, fsdp2, flags: what differs in the files and on the command line.
        """
        family = self.model.family
        balance = {"loss_cfg": {"router_aux_loss_coef": self.model.balance}} if self.model.balance else {}
        keys = {**data_keys(family), "dataset_param.basic_parameters.val_dataset": [str(self._valid)]}
        if form == "packed":
            keys["dataset_param.basic_parameters.packing"] = True
        files = write_run_files(
            folder,
            self.family.hf_dir,
            self.family.data,
            model={**family.model, **balance, **(model or {})},
            data={**keys, **(data or {})},
            fsdp2={"sub_modules_to_wrap": list(family.wrap), **layout.fsdp2, **(fsdp2 or {})},
        )
        batch = (2, 8) if form == "padded" else (1, 4)
        settings = {"micro_batch_size": batch[0], "global_batch_size": batch[1], "train_iters": STEPS}
        settings |= {"seq_length": self._pack_length if form == "packed" else None}
        settings |= {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": LEARNING_RATE, "weight_decay": 0.0}
        settings |= {"clip_grad": CLIP, "eval_interval": 100, "eval_iters": 100, "log_row_ids": True}
        settings |= {"save": folder / "run", "no_save_optim": True}
        return launch_flags(files, **{**settings, **layout.flags, **flags})

    def run(
        self, layout: Layout, form: str, folder: Path, *, runner: Callable[..., Any] = run_captured, **changes: Any
    ) -> Found:
        """Train in a layout; every rank sees the same gradients and weights.

        Args:
            runner: calls the entry script, as `run_captured` does.
            changes: what differs in files and flags.
        """
        (folder / "run").mkdir(parents=True)
        words = self.words(layout, form, folder, **changes)
        ranks = self._pools[layout.world].run(runner, words, self.model.script, folder / "run", STEPS, timeout=170)
        assert all(sums == ranks[0] for sums in ranks), "ranks hold different gradients or weights"
        return Found.read(folder / "run", layout.world)

    @functools.cache  # noqa: B019 (a case lives as long as the tests)
    def alone(self, form: str) -> Found:
        """The run of one process."""
        return self.run(Layout(1), form, self.folder / f"alone-{form}")

    @functools.cache  # noqa: B019
    def plain(self, form: str, frozen: str = NOTHING) -> PlainRun:
        """The hand-written loop, over the rows of the run of one process.

        Args:
            frozen: a pattern that is found in the names of parameters that are not trained.
        """
        return self.plain_of(self.alone(form), frozen=lambda name: re.search(frozen, name) is not None)

    def plain_of(self, alone: Found, **how: Any) -> PlainRun:
        """The hand-written loop, over the rows of a run of one process.

        Args:
            how: further arguments of `train_plainly`.
        """
        return train_plainly(
            self.family.hf_dir,
            self.family.inputs(),
            STEPS,
            rows_of=lambda step: alone.rows[step],
            valid=VALID,
            lr=LEARNING_RATE,
            clip=CLIP,
            coefficient=self.model.balance,
            outputs=self.model.family.outputs,
            **how,
        )
