"""Samples per second of LLaMA-Factory and ms-swift; contenders of samples_per_second.py, with Pythons of their own.

The Python that runs it has the trainer, and not this package. Make one for each:

    python -m venv /tmp/llamafactory && /tmp/llamafactory/bin/pip install llamafactory torchvision
    python -m venv /tmp/ms-swift && /tmp/ms-swift/bin/pip install ms-swift qwen_vl_utils torchvision

It trains all parameters for one pass over the rows, in float32 on the host, and prints what this rank has done. The
trainers' own collators process images in every step; what lies between two steps is therefore not counted.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: trainer → ways of joining rows in a step
WAYS = {"llamafactory": ("default", "grouped", "packed"), "ms-swift": ("default", "grouped", "packed")}


def main() -> None:
    """Train, and print the figures as samples_per_second.py reads them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trainer", choices=WAYS)
    parser.add_argument("way", choices=("default", "grouped", "packed"))
    parser.add_argument("folder", type=Path, help="with hf/ and data/rows.json")
    parser.add_argument("--micro-batch", type=int, required=True, help="padded rows")
    parser.add_argument("--capacity", type=int, required=True, help="tokens of a pack")
    parser.add_argument("--warm-up", type=int, required=True, help="steps that aren't counted")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    rows = json.loads((options.folder / "data" / "rows.json").read_text())
    meter = Meter(options.warm_up)
    meter.watch()
    {"llamafactory": train_llamafactory, "ms-swift": train_swift}[options.trainer](options, rows)
    sys.stdout.write(f"found {json.dumps(meter.found(len(rows)))}\n")  # at once: other ranks write to the same pipe
    sys.stdout.flush()


class Meter:
    """Counts tokens and time of the steps of whatever the HF Trainer's loop runs in this process."""

    def __init__(self, warm_up: int) -> None:
        self._warm_up = warm_up
        self._tokens: list[int] = []
        self._seconds: list[tuple[float, float]] = []
        self._in_all = 0.0

    def watch(self) -> None:
        """Let every Trainer report its steps from now on."""
        from transformers import Trainer, TrainerCallback

        meter, train = self, Trainer.train

        class Clock(TrainerCallback):
            def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
                self.began = time.perf_counter(), time.process_time()

            def on_step_end(self, *args: Any, **kwargs: Any) -> None:
                meter._seconds.append((time.perf_counter() - self.began[0], time.process_time() - self.began[1]))

            def on_train_end(self, *args: Any, **kwargs: Any) -> None:
                meter._add_up()

        def watched(trainer: Any, *args: Any, **kwargs: Any) -> Any:
            trainer.add_callback(Clock())
            trainer.training_step = meter._counting(trainer.training_step, trainer.processing_class)
            return train(trainer, *args, **kwargs)

        Trainer.train = watched

    def _counting(self, step: Callable[..., Any], tokenizer: Any) -> Callable[..., Any]:
        pad = getattr(tokenizer, "tokenizer", tokenizer).pad_token_id

        def counted(model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
            mask = inputs.get("attention_mask")
            is_row = mask is not None and mask.dim() == 2  # otherwise a mask of queries and keys
            self._tokens.append(int((mask > 0 if is_row else inputs["input_ids"] != pad).sum()))
            return step(model, inputs, *args, **kwargs)

        return counted

    def _add_up(self) -> None:
        """Sum the tokens of all ranks, while they are connected."""
        import torch
        import torch.distributed as dist

        in_all = torch.tensor(float(sum(self._tokens)))
        if dist.is_initialized():
            dist.all_reduce(in_all)
        self._in_all = float(in_all)

    def found(self, rows: int) -> dict[str, float]:
        """Return this rank's samples after the first steps, in rows of the mean length, and their time."""
        counted = sum(self._tokens[self._warm_up :])
        seconds, processor = map(sum, zip(*self._seconds[self._warm_up :]))
        samples = counted / self._in_all * rows
        return {"samples": samples, "seconds": seconds, "processor": processor, "tokens": self._in_all}


def common(options: argparse.Namespace) -> dict[str, Any]:
    """Arguments that both trainers call alike: those of the HF Trainer in samples_per_second.py."""
    return {
        "output_dir": tempfile.mkdtemp(prefix="trained-"),
        "per_device_train_batch_size": 1 if options.way == "packed" else options.micro_batch,
        "gradient_accumulation_steps": 1,
        "num_train_epochs": 1,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.1,
        "adam_beta2": 0.95,
        "max_grad_norm": 1.0,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "use_cpu": True,
        "dataloader_num_workers": 0,
        "dataloader_pin_memory": False,
    }


def train_llamafactory(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Full training of LLaMA-Factory, packed as `neat_packing` does it."""
    from llamafactory.train.tuner import run_exp

    data = options.folder / "data"
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    described = {"file_name": "rows.json", "formatting": "sharegpt", "tags": tags}
    described["columns"] = {"messages": "messages", "images": "images"}
    (data / "dataset_info.json").write_text(json.dumps({"rows": described}))
    ways: dict[str, dict[str, Any]] = {
        "default": {},
        "grouped": {"train_sampling_strategy": "group_by_length"},
        "packed": {"packing": True, "neat_packing": True},
    }
    run_exp(
        {
            **common(options),
            **ways[options.way],
            "model_name_or_path": str(options.folder / "hf"),
            "stage": "sft",
            "do_train": True,
            "finetuning_type": "full",
            "freeze_vision_tower": False,
            "freeze_multi_modal_projector": False,
            "disable_gradient_checkpointing": True,
            "template": "qwen2_vl",
            "default_system": "",
            "dataset": "rows",
            "dataset_dir": str(data),
            "media_dir": str(data),
            "cutoff_len": options.capacity,
            "overwrite_cache": True,
        }
    )


def train_swift(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Full training of ms-swift, on rows that are tokenized before."""
    from swift.pipelines import sft_main
    from swift.template.templates.qwen import Qwen2VLTemplate
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.folder / "hf")
    Qwen2VLTemplate.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")  # it states that of Qwen's own
    data = options.folder / "data"
    file = data / "rows_of_swift.jsonl"
    if not file.exists():
        written = [{**row, "images": [str(data / image) for image in row["images"]]} for row in rows]
        partial = file.with_suffix(".partial")
        partial.write_text("".join(f"{json.dumps(row)}\n" for row in written))
        partial.rename(file)
    ways = {"default": {}, "grouped": {"group_by_length": True}, "packed": {"packing": True}}
    settings = {
        **common(options),
        **ways[options.way],
        "model": str(options.folder / "hf"),
        "model_type": "qwen2_5_vl",
        "template": "qwen2_5_vl",
        "system": "",
        "dataset": str(file),
        "split_dataset_ratio": 0,
        "tuner_type": "full",
        "freeze_vit": False,
        "freeze_aligner": False,
        "gradient_checkpointing": False,
        "torch_dtype": "float32",
        "fp16": False,  # which it would be for float32
        "bf16": False,
        "max_length": options.capacity,
        "lazy_tokenize": False,
        "add_version": False,
    }
    words = [
        (f"--{name}", str(value).lower() if isinstance(value, bool) else str(value)) for name, value in settings.items()
    ]
    sft_main([word for pair in words for word in pair])


if __name__ == "__main__":
    main()
