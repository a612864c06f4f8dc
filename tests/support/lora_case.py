"""A case of the LoRA table: a model with adapters in a layout, beside a hand-written peft + transformers loop."""

from __future__ import annotations

import functools
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.parallel_case import VALID, Found, ParallelCase
from tests.support.parallel_models import Layout
from tests.support.reference import PlainRun, load_plain, row_losses

RANK, ALPHA = 4, 8
_PREFIX = "base_model.model."


def _as_in_peft(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dim() != 3 or "lora_" not in name:
        return tensor
    if "lora_A" in name:
        return tensor.reshape(-1, tensor.shape[2])
    return torch.einsum("eor->ore", tensor).reshape(tensor.shape[1], -1)


@dataclass(frozen=True)
class Targets:
    """What gets adapters.

    Attributes:
        modules, parameters: as PEFT and the flags name them.
        settings: of PEFT's LoraConfig.
        flags: of the launch, in the place of `settings`.
    """

    modules: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)
    flags: Mapping[str, Any] = field(default_factory=dict)


class LoraCase:
    """Runs of a model with adapters that start from a PEFT directory."""

    def __init__(self, case: ParallelCase, targets: Targets, folder: Path) -> None:
        self.case, self.targets, self.folder = case, targets, folder

    @functools.cached_property
    def start(self) -> Path:
        """A PEFT directory with random A and B: with B zero, the first step has no gradient for A."""
        self._peft_model().save_pretrained(self.folder / "start")
        return self.folder / "start"

    @property
    def flags(self) -> dict[str, Any]:
        """Of the launch."""
        flags = {"lora_target_modules": ",".join(self.targets.modules) or None, "lora_r": RANK, "lora_alpha": ALPHA}
        flags |= {"lora_target_parameters": ",".join(self.targets.parameters) or None, "lora_load": self.start}
        return {**flags, **self.targets.flags}

    def run(self, layout: Layout, form: str, folder: Path, **changes: Any) -> Found:
        """Train in a layout; the weights are those that are trained."""
        found = self.case.run(layout, form, folder, **{**self.flags, **changes})
        found.weights = {name: tensor for name, tensor in found.weights.items() if name in found.gradients}
        # adapters are stacked by expert, [experts, rank, in] and [experts, out, rank]; in PEFT they are matrices
        found.gradients, found.weights = (
            {name: _as_in_peft(name, t) for name, t in tensors.items()} for tensors in (found.gradients, found.weights)
        )
        return found

    @functools.cache  # noqa: B019 (a case lives as long as the tests)
    def alone(self, form: str) -> Found:
        """The run of one process."""
        folder = self.folder / f"alone-{form}"
        found = self.run(Layout(1), form, folder)
        shutil.rmtree(folder)
        return found

    @functools.cache  # noqa: B019
    def plain(self, form: str) -> PlainRun:
        """The hand-written loop, over the rows of the run of one process."""
        from peft import PeftModel

        model = PeftModel.from_pretrained(load_plain(self.case.family.hf_dir), self.start, is_trainable=True)
        found = self.case.plain_of(self.alone(form), model=model)
        found.gradients, found.weights = (
            {name.removeprefix(_PREFIX).replace(".modules_to_save.default", ""): t for name, t in tensors.items()}
            for tensors in (found.gradients, found.weights)
        )
        return found

    def valid_loss_of(self, directory: Path) -> float:
        """The mean token loss of the validation rows under the adapters that PEFT loads from a directory."""
        from peft import PeftModel

        case = self.case
        model = PeftModel.from_pretrained(load_plain(case.family.hf_dir), directory)
        model.eval()
        inputs, outputs = case.family.inputs(), case.model.family.outputs
        with torch.no_grad():
            return float(torch.cat([row_losses(model, inputs[n], outputs)[0] for n in VALID]).mean())

    def _peft_model(self) -> Any:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(11)
        targets = self.targets
        config = LoraConfig(
            r=RANK,
            lora_alpha=ALPHA,
            target_modules=list(targets.modules) or None,
            target_parameters=list(targets.parameters) or None,
            init_lora_weights=False,
            **targets.settings,
        )
        return get_peft_model(load_plain(self.case.family.hf_dir), config)
