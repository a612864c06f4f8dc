"""Samples with text, images and video, packed into rows by hand, and a run of an entry script over such batches."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from mindspeed_mm.configs.global_args import get_args
from mindspeed_mm.tasks.train.language import TRANSFORMERS, VLM
from mindspeed_mm.training import pretrain

Sample = dict[str, torch.Tensor]
# what a sample holds beside text: "image" or "video" with (time, height, width) in patches
MEDIA: tuple[tuple[tuple[str, tuple[int, int, int]], ...], ...] = (
    (("image", (1, 4, 4)),),
    (),
    (("image", (1, 2, 8)), ("video", (2, 4, 2))),
    (("video", (3, 2, 4)),),
    (),
    (("image", (1, 8, 2)), ("image", (1, 4, 6))),
    (("image", (1, 2, 2)),),
)
# which samples share a row; rows 1 and 2 are a micro-batch, and rows 3 and 4
ROWS = ((0, 1, 2), (3,), (4, 5), (6, 0))
_TENSORS = {"image": ("pixel_values", "image_grid_thw"), "video": ("pixel_values_videos", "video_grid_thw")}


def make_samples(hf_dir: Path, seed: int = 0) -> list[Sample]:
    """The samples of MEDIA (of a text model: without their media), as a processor would give them, each alone.

    Args:
        hf_dir: whose token ids and vocabulary they have.
    """
    config = json.loads((Path(hf_dir) / "config.json").read_text())
    random = torch.Generator().manual_seed(seed)
    return [_sample(config, media if "vision_config" in config else (), random) for media in MEDIA]


def _sample(config: dict[str, Any], media: tuple[tuple[str, tuple[int, int, int]], ...], random: Any) -> Sample:
    def text(least: int) -> list[int]:
        count = int(torch.randint(least, least + 6, (1,), generator=random))
        return torch.randint(8, 250, (count,), generator=random).tolist()

    ids, types = text(3), []
    types = [0] * len(ids)
    held: dict[str, list[Any]] = {"image": [], "video": []}
    for kind, (t, h, w) in media:
        count, after = t * h * w // 4, text(3)
        ids += [config["vision_start_token_id"], *[config[f"{kind}_token_id"]] * count, *after]
        types += [0, *[1 if kind == "image" else 2] * count, *[0] * len(after)]
        held[kind].append((t, h, w))
    ids += text(4)
    types += [0] * (len(ids) - len(types))
    sample = {"input_ids": torch.tensor([ids])}
    sample["labels"] = sample["input_ids"].masked_fill(torch.tensor([types]) > 0, -100)
    sample["labels"][:, 1] = -100  # the first token has a label, which nothing in front of it may predict
    if "vision_config" in config:
        sample["mm_token_type_ids"] = torch.tensor([types])
    for kind, (pixels, grid) in _TENSORS.items():
        if held[kind]:
            patches = sum(t * h * w for t, h, w in held[kind])
            sample[pixels] = torch.randn(patches, 3 * 2 * config["vision_config"]["patch_size"] ** 2, generator=random)
            sample[grid] = torch.tensor(held[kind])
    if held["video"]:
        sample["second_per_grid_ts"] = torch.rand(len(held["video"]), generator=random) + 0.5
    return sample


def pack(rows: list[list[Sample]], length: int | None = None) -> dict[str, Any]:
    """A micro-batch whose rows hold several samples, in the form that the loader gives.

    Args:
        length: of a row; None: of the longest.
    """
    length = length or max(sum(s["input_ids"].shape[1] for s in row) for row in rows)
    batch: dict[str, Any] = {}
    for key, padding in (("input_ids", 0), ("labels", -100), ("mm_token_type_ids", 0)):
        if key in rows[0][0]:
            whole = [torch.cat([s[key][0] for s in row]) for row in rows]
            batch[key] = torch.stack([torch.nn.functional.pad(r, (0, length - len(r)), value=padding) for r in whole])
    batch["documents"] = torch.zeros_like(batch["input_ids"])
    for number, row in enumerate(rows):
        place = 0
        for document, sample in enumerate(row, 1):
            end = place + sample["input_ids"].shape[1]
            batch["documents"][number, place:end], place = document, end
    for key in ("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"):
        if found := [s[key] for row in rows for s in row if key in s]:
            batch[key] = torch.cat(found)
    return batch


def packed_batches(samples: list[Sample]) -> list[dict[str, Any]]:
    """ROWS, two to a micro-batch, with the numbers of their samples."""
    batches = []
    for rows in (ROWS[:2], ROWS[2:]):
        ids = [number for row in rows for number in row]
        batch = pack([[samples[number] for number in row] for row in rows])
        batches.append({**batch, "row_ids": torch.tensor(ids), "num_rows": len(ids)})
    return batches


def run_on_batches(words: list[str], script: str, batches: list[dict[str, Any]]) -> None:
    """Train with an entry script's own callbacks, over and over on `batches`, dealt out to the data-parallel ranks."""
    recipe = VLM if Path(script).stem == "pretrain_vlm" else TRANSFORMERS

    def provider() -> Any:
        args = get_args()
        return batches[args.data_parallel_rank :: args.data_parallel_size], None, None

    before = sys.argv
    sys.argv = [script, *words]
    try:
        pretrain(provider, recipe.model, forward_step_func=recipe.forward_step)
    finally:
        sys.argv = before
