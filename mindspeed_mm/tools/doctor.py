"""`mindspeed-mm doctor`: versions, devices, kernels, collectives and limits of this machine, and what hinders a run."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import resource
import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_mm.tools.collective_check import Collectives, check_collectives
from mindspeed_mm.utils.log import log_on_stderr
from mindspeed_mm.utils.versions import TESTED, installed_version, release, version_faults

if TYPE_CHECKING:
    from mindspeed_mm.accelerator import Accelerator

_OTHERS = ("torch_npu", "mindspeed", "flash_attn", "flash_attn_3", "liger_kernel", "transformer_engine")
_FEW_FILES = 4096
_FEW_SHARED_BYTES = 1 << 30


@dataclass
class Findings:
    """What the machine has.

    Attributes:
        python, system: version of Python, and the operating system.
        cores: processor cores.
        packages: name → installed version; None: not installed.
        untested: packages in another version than the tested set's, with that one.
        device: kind and model of the devices, their number and memory in bytes, and peak in bf16 (FLOP/s).
        products: the library that multiplies float32 matrices in training.
        attention: use → kernel, of the tables that a run takes kernels from.
        not_taken: kernel → why it isn't taken.
        implementations: value of attn_implementation → why it doesn't run here; "": it does.
        fused: flag → kernel of norms, gated MLPs and rotary positions; `why_not_fused` if there is none.
        collectives: of the ranks of this machine; None: not checked.
        free_bytes: of the file system of the working directory.
        shared_memory_bytes: free in /dev/shm, which loader workers pass batches through; None: there is none.
        open_files: limit of a process.
        problems: what would slow a run down or spoil it.
    """

    python: str
    system: str
    cores: int
    packages: dict[str, str | None]
    untested: dict[str, str]
    device: dict[str, Any]
    products: str
    attention: dict[str, str]
    not_taken: dict[str, str]
    implementations: dict[str, str]
    fused: dict[str, str]
    why_not_fused: str
    collectives: Collectives | None
    free_bytes: int
    shared_memory_bytes: int | None
    open_files: int
    problems: list[str] = field(default_factory=list)


def main(words: Sequence[str]) -> int:
    """Print what the machine has.

    Returns:
        0, or 1 if something would slow a run down or spoil it.
    """
    parser = argparse.ArgumentParser(prog="mindspeed-mm doctor", description=(__doc__ or "").partition(": ")[2])
    parser.add_argument("--json", action="store_true", help="one JSON object in place of lines")
    parser.add_argument("--no-collectives", action="store_true", help="start no processes that exchange tensors")
    options = parser.parse_args(list(words))
    with log_on_stderr():
        found = examine(with_collectives=not options.no_collectives)
    print(json.dumps(asdict(found), indent=2) if options.json else "\n".join(_lines(found)))
    return 1 if found.problems else 0


def examine(*, with_collectives: bool = True) -> Findings:
    """Look at the machine.

    Args:
        with_collectives: start a process a device (two without any), which exchange tensors.
    """
    from mindspeed_mm.utils.torch_import import import_torch

    torch = import_torch()
    from mindspeed_mm import accelerator
    from mindspeed_mm.accelerator.attention.table import attention_table
    from mindspeed_mm.configs.model_rules import ATTENTION_NAMES

    device = accelerator.current()
    number = 0 if device.is_host else torch.accelerator.device_count()
    packages = {name: installed_version(name) for name in (*TESTED, *_OTHERS)}
    fused = device.fused_kernels()
    found = Findings(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        cores=os.cpu_count() or 1,
        packages=packages,
        untested={name: tested for name, tested in TESTED.items() if _differs(packages[name], tested)},
        device={
            "kind": device.name,
            "model": device.model_name(),
            "number": number,
            "memory_bytes": device.total_memory(),
            "bf16_flops": device.peak_flops("bf16"),
            "collectives": device.collective_backend,
        },
        products=device.float32_products(),
        attention={f"{line.use} ({line.dtypes})": line.kernel for line in attention_table(device)},
        not_taken=dict(device.kernels_not_taken()),
        implementations={name: device.why_no_attention(name) or "" for name in ATTENTION_NAMES},
        fused={}
        if fused is None
        else {
            "norms (--use-fused-rmsnorm)": fused.rms_norm_name,
            "gated MLPs (--use-fused-swiglu)": fused.silu_mul_name,
            "rotary positions (--use-fused-rotary-pos-emb)": fused.rotary_name,
        },
        why_not_fused="" if fused is not None else device.why_no_fused_kernels() or "",
        collectives=check_collectives(number or 2) if with_collectives else None,
        free_bytes=shutil.disk_usage(".").free,
        shared_memory_bytes=shutil.disk_usage("/dev/shm").free if os.path.isdir("/dev/shm") else None,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    )
    found.problems = [*general_problems(device), *_limits(found)]
    return found


def general_problems(device: Accelerator) -> list[str]:
    """Return what in the environment would slow a run on a device down or spoil it."""
    from mindspeed_mm.accelerator.environment import harmful_settings

    found = []
    if importlib.util.find_spec("torchvision") is None:
        found.append(
            "torchvision is missing: image processors would change their pixel values without a word, and no "
            "video processor can be built; install the version that belongs to this torch"
        )
    return found + version_faults() + harmful_settings(device.name)


def _limits(found: Findings) -> list[str]:
    problems = []
    if found.collectives is not None and found.collectives.failure:
        problems.append(f"collectives between {found.collectives.ranks} ranks fail: {found.collectives.failure}")
    if found.open_files < _FEW_FILES:
        problems.append(
            f"a process may open {found.open_files} files only; loaders of media and sharded checkpoints need more: "
            "ulimit -n 65536"
        )
    if found.shared_memory_bytes is not None and found.shared_memory_bytes < _FEW_SHARED_BYTES:
        problems.append(
            f"/dev/shm has {found.shared_memory_bytes / 2**20:.0f} MiB free, through which loader workers pass batches "
            "with pictures; give a container more (docker run --shm-size 16g), or --num-workers 0"
        )
    return problems


def _differs(found: str | None, tested: str) -> bool:
    return found is not None and release(found) != release(tested)


def _lines(found: Findings) -> list[str]:
    device = found.device
    lines = [f"python {found.python} on {found.system}, {found.cores} cores"]
    for name, version in found.packages.items():
        tested = f" (tested: {found.untested[name]})" if name in found.untested else ""
        lines.append(f"  {name:<18} {version or 'not installed'}{tested}")
    lines.append(f"device: {device['kind']} ({device['model']}), collectives: {device['collectives']}")
    if device["number"]:
        lines.append(f"  {device['number']} devices of {device['memory_bytes'] / 2**30:.0f} GiB")
    peak = device["bf16_flops"]
    lines.append(f"  bf16 peak: {peak / 1e12:.0f} TFLOP/s" if peak else "  bf16 peak: unknown, MFU is not logged")
    lines.append(f"  float32 matrix products of training: {found.products}")
    lines.append("attention, unless model.json's attn_implementation states another:")
    lines += [f"  {use}: {kernel}" for use, kernel in found.attention.items()]
    lines += [f"  not taken: {kernel}: {why}" for kernel, why in found.not_taken.items()]
    lines += [f"  attn_implementation {name}: {why or 'runs'}" for name, why in found.implementations.items()]
    lines.append("fused kernels of language models:" + ("" if found.fused else f" none; {found.why_not_fused}"))
    lines += [f"  {use}: {kernel}" for use, kernel in found.fused.items()]
    if found.collectives is not None and not found.collectives.failure:
        lines.append(f"collectives between ranks: {found.collectives}")
    lines.append(f"disk: {found.free_bytes / 2**30:.0f} GiB free here; a process may open {found.open_files} files")
    if found.shared_memory_bytes is not None:
        lines.append(f"shared memory: {found.shared_memory_bytes / 2**30:.1f} GiB free in /dev/shm")
    return lines + ([f"problem: {problem}" for problem in found.problems] or ["nothing hinders a run"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
