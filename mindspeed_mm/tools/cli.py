"""`mindspeed-mm`: command lines that need no training run.

`mindspeed-mm doctor` looks at the machine, `mindspeed-mm data check data.json` at the rows of a run;
`mindspeed-mm data extract-features` encodes clips and captions before a generation model is trained;
`mindspeed-mm chat PATH` talks to a model, `mindspeed-mm serve PATH` lets OpenAI's clients talk to it.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

import mindspeed_mm.utils.interrupted  # noqa: F401  (before what takes long to import)
from mindspeed_mm.tools import data_check
from mindspeed_mm.tools.feature_extraction import command as feature_extraction
from mindspeed_mm.utils.errors import MMError, kind_of
from mindspeed_mm.utils.versions import installed_version, version_faults

if TYPE_CHECKING:
    from mindspeed_mm.accelerator import Accelerator

_PACKAGES = (
    "torch",
    "torchvision",
    "transformers",
    "diffusers",
    "megatron-core",
    "safetensors",
    "pyarrow",
    "av",
    "torch_npu",
    "mindspeed",
    "flash_attn",
    "flash_attn_3",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    parser = argparse.ArgumentParser(prog="mindspeed-mm", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("doctor", help="say what this machine can train with, and what hinders it")
    data = commands.add_parser("data", help="look at data sets").add_subparsers(dest="action", required=True)
    data_check.add_check_arguments(
        data.add_parser("check", help="read a data set without a model: rows, lengths, faults")
    )
    extract = data.add_parser("extract-features", help="make latents and text states of clips before training")
    feature_extraction.add_extraction_arguments(extract)
    commands.add_parser("chat", help="talk to a model: mindspeed-mm chat PATH", add_help=False)
    commands.add_parser("serve", help="answer OpenAI's clients: mindspeed-mm serve PATH", add_help=False)
    commands.add_parser("train", help="train: mindspeed-mm train run.yaml, or any launch", add_help=False)
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if words[:1] == ["chat"]:  # its flags are those of inference_vlm.py
            from mindspeed_mm.tasks.inference.chat import main as chat

            return chat(words[1:])
        if words[:1] == ["train"]:  # its options are torchrun's
            from mindspeed_mm.tools.train.command import main as train

            return train(words[1:])
        if words[:1] == ["serve"]:
            from mindspeed_mm.tasks.serving.command import main as serve

            return serve(words[1:])
        options = parser.parse_args(words)
        if options.command == "doctor":
            return doctor()
        if options.action == "extract-features":
            return feature_extraction.extract_features(options)
        return data_check.check_data(options)
    except MMError as error:
        print(f"{kind_of(error)}: {error}", file=sys.stderr)
        return 1


def doctor() -> int:
    """Print versions, the device and its collectives, and settings known to hurt.

    Returns:
        0, or 1 if something would slow a run down or spoil it.
    """
    from mindspeed_mm.utils.torch_import import import_torch

    print(f"python {platform.python_version()} on {platform.system()} {platform.machine()}, {os.cpu_count()} cores")
    for name in _PACKAGES:
        print(f"  {name:<14} {installed_version(name) or 'not installed'}")
    torch = import_torch()
    from mindspeed_mm import accelerator

    device = accelerator.current()
    print(f"device: {device.name} ({device.model_name()}), collectives: {device.collective_backend}")
    if not device.is_host:
        print(f"  {torch.accelerator.device_count()} devices")
    peak = device.peak_flops("bf16")
    print(f"  bf16 peak: {peak / 1e12:.0f} TFLOP/s" if peak else "  bf16 peak: unknown, MFU is not logged")
    _print_kernels(device)
    problems = _problems(device.name)
    for problem in problems:
        print(f"problem: {problem}")
    if not problems:
        print("nothing hinders a run")
    return 1 if problems else 0


def _print_kernels(device: Accelerator) -> None:
    """Print which kernel computes attention where, why others aren't taken, and what flags and model.json may state."""
    from mindspeed_mm.accelerator.attention.table import attention_table
    from mindspeed_mm.configs.model_rules import ATTENTION_NAMES

    print("attention, unless model.json's attn_implementation states another:")
    for line in attention_table(device):
        print(f"  {line.use} ({line.dtypes}): {line.kernel}")
    for kernel, why in device.kernels_not_taken().items():
        print(f"  not taken: {kernel}: {why}")
    for name in ATTENTION_NAMES:
        why_not = device.why_no_attention(name)
        print(f"  attn_implementation {name}: {'runs' if why_not is None else why_not}")
    fused = device.fused_kernels()
    print("fused kernels of language models:" + ("" if fused else f" none; {device.why_no_fused_kernels()}"))
    if fused is not None:
        print(f"  norms (--use-fused-rmsnorm): {fused.rms_norm_name}")
        print(f"  gated MLPs (--use-fused-swiglu): {fused.silu_mul_name}")
        print(f"  rotary positions (--use-fused-rotary-pos-emb): {fused.rotary_name}")


def _problems(device: str) -> list[str]:
    from mindspeed_mm.accelerator.environment import harmful_settings

    found = []
    if importlib.util.find_spec("torchvision") is None:
        found.append(
            "torchvision is missing: image processors would change their pixel values without a word, and no "
            "video processor can be built; install the version that belongs to this torch"
        )
    return found + version_faults() + harmful_settings(device)


if __name__ == "__main__":
    sys.exit(main())
