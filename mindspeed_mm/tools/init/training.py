"""What the files of all runs have in common: flags of training, their comments, and the heading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mindspeed_mm.tools.init.choices import BatchSizes, Tuning, choose_rate, count_in_words, recompute_flags
from mindspeed_mm.tools.init.machine import Machine

#: section → comments at its end
After = dict[str, list[str]]
_ADAPTERS: Mapping[str, Any] = {"lora_target_modules": "all-linear", "lora_r": 16, "lora_alpha": 32}


@dataclass(frozen=True)
class Training:
    """How a model is trained, whatever it is.

    Attributes:
        parameters: number of the weights of what is trained.
        machine: where it is meant to run.
        tuning: what is trained.
        batches: sizes of batches.
        save: the run folder.
    """

    parameters: int
    machine: Machine
    tuning: Tuning
    batches: BatchSizes
    save: str

    def flags(self) -> dict[str, Any]:
        """Return the flags of `gpt_args`."""
        batches = self.batches
        flags: dict[str, Any] = {"micro_batch_size": batches.micro, "global_batch_size": batches.whole}
        flags |= {"train_epochs": batches.epochs, "lr": choose_rate(self.parameters, is_lora=self.tuning.is_lora)}
        flags |= {"lr_decay_style": "cosine", "lr_warmup_fraction": 0.05}
        if self.machine.has_devices:
            flags["bf16"] = True
        flags |= recompute_flags(self.parameters, self.machine)
        if self.tuning.is_lora:
            flags |= _ADAPTERS
        flags["save"] = self.save
        if batches.save_interval is not None:
            flags |= {"save_interval": batches.save_interval, "save_total_limit": 2}
        flags["save_hf"] = True
        if batches.validation:
            flags |= {"eval_interval": batches.steps_per_epoch, "eval_iters": batches.validation_steps}
        return flags

    def comments(self, unit: str, exported: str) -> tuple[dict[str, str], After]:
        """Return what is said above flags, and at the end of their section.

        Args:
            unit: what a batch consists of, in the plural.
            exported: what `hf/` is.
        """
        batches, flags = self.batches, self.flags()
        words = count_in_words(self.parameters)
        rate = f"A usual rate for {'adapters of ' if self.tuning.is_lora else ''}{words} parameters"
        above = {
            "micro_batch_size": f"{unit.capitalize()} of a device at once, and of an optimizer step: "
            f"{batches.steps_per_epoch} steps an epoch, {batches.steps} in all.",
            "lr": f"{rate}." if self.tuning.is_lora else f"{rate}; {self.tuning.why}.",
            "save": f"Checkpoints, metrics and what is exported: hf/, {exported}.",
        }
        after: After = {}
        if "bf16" in flags:
            above["bf16"] = "Compute in bfloat16, over float32 weights."
        else:
            after["gpt_args"] = ["Computed in float32, as this is a CPU; on a device: bf16: true"]
        if "recompute_granularity" in flags:
            above["recompute_granularity"] = "Compute blocks again in backward, in place of keeping activations."
        if self.tuning.is_lora:
            above["lora_target_modules"] = f"LoRA: {self.tuning.why}."
        return {f"gpt_args.{flag}": comment for flag, comment in above.items()}, after

    def heading(self, found: Sequence[str]) -> list[str]:
        """Return the lines at the top of a file.

        Args:
            found: lines about model and rows.
        """
        return [
            *found,
            f"Made for {self.machine}.",
            "",
            f"mindspeed-mm dry-run {self.save}    what this file trains, without devices",
            f"mindspeed-mm train {self.save}      train; section.key=value after it changes a value of this file",
            "",
            "Keys of gpt_args are flags, the other sections are model.json, data.json and fsdp2.yaml; all of them,",
            "with their defaults, are in docs/configuration.md. Relative paths start at working_directory; where it is",
            "missing, as on another machine, where 'save' starts.",
        ]

    def summary(self, unit: str) -> list[str]:
        """Return lines for the console.

        Args:
            unit: what a batch consists of, in the plural.
        """
        batches = self.batches
        return [
            f"machine: {self.machine}; {self.tuning.why}",
            f"training: {batches.steps} steps ({batches.epochs} epochs), {batches.whole} {unit} each, learning rate "
            f"{choose_rate(self.parameters, is_lora=self.tuning.is_lora):g}",
        ]
