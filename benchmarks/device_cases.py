"""Models and rows of the benchmark on a device, made from nothing: the same weights and rows for all contenders."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

WORDS = "red green blue small large round square picture left right above below what where".split()  # noqa: SIM905
IMAGES = ((448, 336), (336, 448), (560, 336))
"""Widths and heights of pictures."""
MICRO_ROWS = 4
"""Rows of a padded micro-batch."""
VOCABULARY = 151936
TEXT = ["model.layers.{*}"]


@dataclass(frozen=True)
class Case:
    """What is trained on what.

    Attributes:
        make: (folder, device, smallest) → writes the model into folder/hf and micro-batches into folder/*.pt.
        wrap: fsdp2.yaml's sub_modules_to_wrap, which `compile: true` compiles as well.
        script: entry script of ours.
        micro_batches: of a step of ours.
        timed: steps that are timed.
        capacity: tokens of a pack; None: nothing is packed.
        unit: what is counted, "tokens" or "samples".
    """

    make: Callable[[Path, torch.device, bool], None]
    wrap: list[str]
    script: str = "pretrain_transformers.py"
    micro_batches: int = 2
    timed: int = 8
    capacity: int | None = 8192
    unit: str = "tokens"

    def pack_length(self, smallest: bool) -> int:
        """Tokens of a pack."""
        assert self.capacity is not None
        return 256 if smallest else self.capacity


def make_dense(folder: Path, device: torch.device, smallest: bool) -> None:
    """Qwen3 of 1.7 B parameters; packs of 8192 tokens of log-normal rows."""
    from mindspeed_mm.tools.tiny_models import qwen3_config

    text = sizes(2048, 6144, 28, 16, 8, smallest)
    tokenizer = make_tokenizer(folder / "hf")
    save_random(qwen3_config(tokenizer, text=text), tokenizer, folder / "hf", device)
    make_batches(folder, smallest, packs=8)


def make_moe(folder: Path, device: torch.device, smallest: bool) -> None:
    """Qwen3-MoE with the layers of 30B-A3B, three of them."""
    from transformers import Qwen3MoeConfig

    text = sizes(2048, 6144, 3, 32, 4, smallest)
    experts: dict[str, Any] = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    if smallest:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    tokenizer = make_tokenizer(folder / "hf")
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = Qwen3MoeConfig(
        **text,
        **experts,
        **ends,
        norm_topk_prob=True,
        mlp_only_layers=[],
        tie_word_embeddings=False,
        architectures=["Qwen3MoeForCausalLM"],
    )
    save_random(config, tokenizer, folder / "hf", device)
    make_batches(folder, smallest, packs=8)


def make_images(folder: Path, device: torch.device, smallest: bool) -> None:
    """Qwen3-VL with the layers of 8B, four of them, and eight of its tower's; rows with 0 to 2 pictures."""
    from transformers import Qwen2VLImageProcessor, Qwen3VLConfig, Qwen3VLProcessor, Qwen3VLVideoProcessor

    hf_dir = folder / "hf"
    tokenizer = make_tokenizer(hf_dir)
    pixels = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64 if smallest else 1024 * 1024}
    image = Qwen2VLImageProcessor(patch_size=16, size=pixels)
    video = Qwen3VLVideoProcessor(patch_size=16, size=pixels)
    Qwen3VLProcessor(image, tokenizer, video, chat_template=tokenizer.chat_template).save_pretrained(hf_dir)
    sections = [4, 2, 2] if smallest else [24, 20, 20]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections, "mrope_interleaved": True}
    text = {**sizes(4096, 12288, 4, 32, 8, smallest), "rope_parameters": rope}
    tower: dict[str, Any] = {"depth": 8, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
    tower |= {"deepstack_visual_indexes": [2, 4, 6]}
    if smallest:
        tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2}
        tower |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
    ids = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
    ids |= {"vision_start_token_id": "<|vision_start|>", "vision_end_token_id": "<|vision_end|>"}
    config = Qwen3VLConfig(
        text_config={**text, "pad_token_id": tokenizer.pad_token_id},
        vision_config={**tower, "out_hidden_size": text["hidden_size"], "patch_size": 16},
        tie_word_embeddings=False,
        architectures=["Qwen3VLForConditionalGeneration"],
        **{key: tokenizer.convert_tokens_to_ids(token) for key, token in ids.items()},
    )
    save_random(config, tokenizer, hf_dir, device)
    make_batches(folder, smallest, packs=4, images=True)


def make_wan(folder: Path, device: torch.device, smallest: bool) -> None:
    """Wan with the layers of 2.1 1.3B, ten of them; latents of 81 frames of 832 × 480, text states of 512 tokens."""
    from diffusers import WanTransformer3DModel

    heads, size, ffn, layers, text, caption = (2, 16, 64, 2, 32, 8) if smallest else (12, 128, 8960, 10, 4096, 512)
    frames, height, width = (3, 8, 8) if smallest else (21, 60, 104)
    torch.manual_seed(0)
    with torch.device(device):
        model = WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=heads,
            attention_head_dim=size,
            in_channels=16,
            out_channels=16,
            text_dim=text,
            freq_dim=256,
            ffn_dim=ffn,
            num_layers=layers,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
        )
    model.cpu().save_pretrained(folder / "hf")
    generator = torch.Generator().manual_seed(0)
    batches = []
    for number in range(4):
        latents = torch.randn(1, 16, frames, height, width, generator=generator)
        states = torch.randn(1, caption, text, generator=generator) * 0.1
        batches.append(
            {
                "latents": latents,
                "text.encoder_hidden_states": states,
                "sample_keys": torch.tensor([number + 1]),
                "sample_weights": torch.ones(1),
                "num_rows": 1,
                "num_tokens": frames * height * width // 4,
            }
        )
    torch.save(batches, folder / "packed.pt")


CASES = {
    "dense text": Case(make_dense, TEXT),
    "images": Case(make_images, ["model.visual.blocks.{*}", "model.language_model.layers.{*}"]),
    "experts": Case(make_moe, TEXT),
    "Wan": Case(
        make_wan, ["predictor.blocks.{*}"], "pretrain_sora.py", micro_batches=1, timed=5, capacity=None, unit="samples"
    ),
}


def sizes(hidden: int, intermediate: int, layers: int, heads: int, groups: int, smallest: bool) -> dict[str, Any]:
    """Fields of a language model's configuration, with heads of 128; of a tiny one, if `smallest`."""
    values = (64, 96, 2, 4, 2) if smallest else (hidden, intermediate, layers, heads, groups)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = {"head_dim": 16, "vocab_size": 384} if smallest else {"head_dim": 128, "vocab_size": VOCABULARY}
    return {**dict(zip(names, values)), **more, "max_position_embeddings": 32768}


def make_tokenizer(folder: Path) -> Any:
    """A byte-level tokenizer with Qwen's added tokens."""
    from mindspeed_mm.tools.tiny_models import build_byte_bpe_tokenizer

    rng = random.Random(0)
    return build_byte_bpe_tokenizer([" ".join(rng.choices(WORDS, k=20)) for _ in range(200)], 384, folder)


def save_random(
    config: Any, tokenizer: Any, folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write a model with random weights, drawn where it is fast."""
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        model = getattr(transformers, config.architectures[0])._from_config(config, dtype=dtype)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.cpu().save_pretrained(folder)


def make_batches(folder: Path, smallest: bool, packs: int, images: bool = False) -> None:
    """Write packs as our loader makes them (packed.pt), and padded micro-batches of the rows (padded.pt)."""
    from samples_per_second import padded

    from mindspeed_mm.data import build_mm_dataset

    capacity, packs = (256, 2) if smallest else (8192, packs)
    rows = make_rows_and_packs(folder, capacity, packs, smallest, images)
    plain = build_mm_dataset(data_param(folder, None)["dataset_param"])
    samples = [dict(plain[number]) for number in range(rows - rows % MICRO_ROWS)]
    groups = [samples[first : first + MICRO_ROWS] for first in range(0, len(samples), MICRO_ROWS)]
    torch.save([padded(group) for group in groups], folder / "padded.pt")


def make_rows_and_packs(folder: Path, capacity: int, packs: int, smallest: bool, images: bool = False) -> int:
    """Write rows.json and packs of it (packed.pt); returns the number of rows."""
    from mindspeed_mm.data import build_mm_dataloader, build_mm_dataset

    rows = write_rows(folder, smallest, images, tokens=int(packs * capacity * 1.2))
    loader = build_mm_dataloader(
        build_mm_dataset(data_param(folder, capacity)["dataset_param"]),
        {"shuffle": False},
        micro_batch_size=1,
        global_batch_size=1,
        dp_rank=0,
        dp_size=1,
    )
    torch.save([dict(batch) for batch in take(iter(loader), packs)], folder / "packed.pt")
    loader.close()
    return rows


def take(batches: Iterator[Any], count: int) -> Iterator[Any]:
    """The first ones."""
    for _ in range(count):
        yield next(batches)


def write_rows(folder: Path, smallest: bool, images: bool, tokens: int) -> int:
    """Write data.json's rows: a question, pictures, and an answer of most of the tokens, of log-normal length.

    Returns:
        the number of rows.
    """
    from PIL import Image

    median, spread, longest = (40, 0.7, 200) if smallest else (400, 1.0, 4096)
    rng, rows, made = random.Random(0), [], 0
    while made < tokens:
        shown = []
        for number in range(len(rows) % 3 if images else 0):
            width, height = (64, 64) if smallest else IMAGES[rng.randrange(len(IMAGES))]
            shown.append(f"images/{len(rows)}_{number}.jpg")
            (folder / "images").mkdir(exist_ok=True)
            coarse = np.random.RandomState(rng.randrange(2**31)).randint(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).save(folder / shown[-1])
            made += width * height // 1024
        length = min(longest, max(12, round(rng.lognormvariate(0, spread) * median)))
        words = rng.choices(WORDS, k=max(4, length // 2))  # a word is about two tokens
        question, answer = words[: len(words) // 4], words[len(words) // 4 :]
        content = "<image>" * len(shown) + " ".join(question)
        messages = [{"role": "user", "content": content}, {"role": "assistant", "content": " ".join(answer)}]
        rows.append({"messages": messages, "images": shown})
        made += length
    (folder / "rows.json").write_text(json.dumps(rows))
    return len(rows)


def data_param(folder: Path, capacity: int | None) -> dict[str, Any]:
    """data.json's content; None: rows aren't packed."""
    from common import data_param

    content = data_param(folder / "hf", folder / "rows.json")
    packing = {} if capacity is None else {"packing": True, "cutoff_len": capacity}
    content["dataset_param"]["basic_parameters"].update(packing)
    return content


def positions_of(documents: torch.Tensor) -> torch.Tensor:
    """Position ids [1, tokens] of a pack, which begin anew with each document.

    Args:
        documents: [1, tokens] int64, numbers of the documents; 0 is padding.
    """
    row = documents[0]
    places = torch.arange(len(row))
    begins = torch.ones_like(row, dtype=torch.bool)
    begins[1:] = row[1:] != row[:-1]
    return (places - torch.where(begins, places, 0).cummax(0).values)[None]
