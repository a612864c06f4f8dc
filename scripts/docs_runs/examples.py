"""The quick starts of two pages, and docs/adding_a_model.md, in a checkout whose run folder is its own."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.docs_runs.common import (
    OWN_MODEL,
    README,
    ROOT,
    DocumentError,
    Done,
    exchange,
    fences,
    items,
    key,
    page_of,
    shell,
)

#: one step in one process, whatever the accuracy
SMALLEST = {"TRAIN_ITERS": "1", "VIDEO_ITERS": "1", "NPUS_PER_NODE": "1", "AT_LEAST": "0", "MBS": "4"}
#: the quick start is the environment, which scripts/test.sh has made, and then the example
QUICK_START = {"scripts/quickstart.sh": "examples/quickstart/run.sh"}
#: the tests of a family are run by scripts/test.sh; that these words name some is seen by collecting them
COLLECTED = {"pytest -q": "pytest -q --collect-only -p no:cacheprovider"}


def checkout() -> Path:
    """A checkout whose examples and run folders are its own."""
    folder = Path("checkout")
    folder.mkdir()
    for name in ("scripts", "configs", "mindspeed_mm", "tests", "pyproject.toml", *(f.name for f in ROOT.glob("*.py"))):
        (folder / name).symlink_to(ROOT / name)
    shutil.copytree(ROOT / "examples", folder / "examples")
    return folder


def quick_starts() -> Done:
    """The quick starts of both pages, to their evaluations."""
    folder, done = checkout(), set()
    for page in (README, OWN_MODEL):
        for command in (item for snippet in fences(page, "bash") for item in items(snippet) if "quickstart" in item):
            instead = QUICK_START if "scripts/quickstart.sh" in command else {}
            if (
                instead
                and 'exec bash examples/quickstart/run.sh "$@"' not in (ROOT / "scripts/quickstart.sh").read_text()
            ):
                raise DocumentError("scripts/quickstart.sh does not end with examples/quickstart/run.sh any more")
            output = shell(exchange(command, instead, page), page, folder=folder, **SMALLEST)
            if "accuracy" not in output:
                raise DocumentError(f"{page.name}: {command} has evaluated nothing:\n{output[-6000:]}")
            done.add(key(page, command))
    return done


def adding_a_model() -> Done:
    """The commands of the page, and then its classes, on what the commands have made."""
    page, folder, done = page_of("adding_a_model.md"), checkout(), set()
    for snippet in fences(page, "bash"):
        for command in items(snippet):
            instead = COLLECTED if "pytest" in command else {}
            output = shell(exchange(command, instead, page), page, folder=folder, **SMALLEST)
            if "train_plugin.sh" in command and "done: 1 iterations" not in output:
                raise DocumentError(f"{page.name}: {command} has trained nothing:\n{output[-6000:]}")
            done.add(key(page, command))
    codes = fences(page, "python")
    for snippet in codes:
        names = names_of_snippets()
        names["ModelHub"].MODEL_MAPPINGS.clear()  # what is found afterwards is the snippet's own
        exec(compile(snippet.text, snippet.place, "exec"), names)
        check_code(names, snippet.place, folder)
    return done | {key(page, snippet.text) for snippet in codes}


def names_of_snippets() -> dict[str, Any]:
    """What the classes and functions of the page lean on."""
    import transformers

    from mindspeed_mm.models.common.base_model import FSDP2Mixin, WeightInitMixin
    from mindspeed_mm.models.common.families import TEXT, Family
    from mindspeed_mm.models.common.family import TEXT_TRAITS
    from mindspeed_mm.models.common.modelzoo import ModelHub
    from mindspeed_mm.models.common.module import MultiModalModule

    return {
        "__name__": "snippet",
        "transformers": transformers,
        "ModelHub": ModelHub,
        "MultiModalModule": MultiModalModule,
        "FSDP2Mixin": FSDP2Mixin,
        "WeightInitMixin": WeightInitMixin,
        "Family": Family,
        "TEXT": TEXT,
        "TEXT_TRAITS": TEXT_TRAITS,
    }


def check_code(names: dict[str, Any], place: str, folder: Path) -> None:
    """What a snippet defines is what the page says that it is."""
    from mindspeed_mm.models.transformers_model import TransformersModel

    if "Olmo2ForCausalLM" in names:
        hf = {"init_from_hf_path": str(folder / "runs/custom_model/olmo2"), "train_from_scratch": True}
        model = TransformersModel({**hf, "model_id": "my_olmo2"})
        right = isinstance(model.model, names["Olmo2ForCausalLM"])
    elif "FAMILY" in names:
        right = any(replace(names["FAMILY"], package=known.package) == known for known in records())
    elif "CustomModel" in names:
        right = isinstance(names["CustomModel"]({"width": 8}), names["FSDP2Mixin"])
    elif "_fully_shard" in names:
        right = sharded_units(names["_fully_shard"], folder) == ["", "decoder.0", "decoder.1", "tower.0", "tower.1"]
    else:
        right = False
    if not right:
        raise DocumentError(
            f"{place}: what it defines is not what the page says; scripts/docs_runs/examples.py checks it"
        )


def records() -> list[Any]:
    """The records of the families that are folders of the package."""
    from mindspeed_mm.models.common.families import family_folders, find_family

    return [find_family(name) for name in family_folders()]


def sharded_units(plan: Any, folder: Path) -> list[str]:
    """The FSDP2 units that a plan in code makes of examples/custom_model's model, which recomputes its decoder."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FSDPModule

    sys.path.insert(0, str(folder / "examples/custom_model"))
    from my_model import CustomModel

    description = json.loads((folder / "examples/custom_model/model.json").read_text())
    model = type("Planned", (CustomModel,), {"_fully_shard": plan})(description)
    Path("plan.yaml").write_text("param_dtype: bf16\n", encoding="utf-8")  # without it one process has nothing to shard
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model.fully_shard(fsdp2_config_path="plan.yaml")
    finally:
        dist.destroy_process_group()
    return sorted(
        n.replace("._checkpoint_wrapped_module", "") for n, m in model.named_modules() if isinstance(m, FSDPModule)
    )
