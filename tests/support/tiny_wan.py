"""The folder of a tiny Wan pipeline (autoencoder, encoders of text and of pictures, tokenizer), and clips."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.support.clips import numbered_frame, write_clip
from tests.support.tiny_diffusers import diffusers_config

WORDS = ("a", "cat", "dog", "runs", "sleeps", "red", "blue", "fast", "slow", "there", "is")
_PREDICTOR = {**diffusers_config("wan"), "num_layers": 1}


def write_encoders(folder: Path, seed: int = 0) -> Path:
    """Write vae, text_encoder, tokenizer and image_encoder with random weights; clips become [4, frames, H/8, W/8]."""
    from diffusers import AutoencoderKLWan
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config, UMT5EncoderModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        AutoencoderKLWan(
            base_dim=4,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[0.5, 0.7, 0.9, 1.1],
        ).save_pretrained(folder / "vae")
        text = UMT5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, pad_token_id=0)
        UMT5EncoderModel(text).save_pretrained(folder / "text_encoder")
        sight = CLIPVisionConfig(
            hidden_size=20,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            image_size=16,
            patch_size=8,
        )
        CLIPVisionModel(sight).save_pretrained(folder / "image_encoder")
    _tokenizer().save_pretrained(folder / "tokenizer")
    sides = {"height": 16, "width": 16}
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size=sides).save_pretrained(folder / "image_encoder")
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {word: number for number, word in enumerate(("<pad>", "</s>", "<unk>", *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>", model_max_length=16
    )


def write_clips(folder: Path, rows: int = 8, pictures: int = 0, frames: int = 7) -> Path:
    """Write clips of 32 × 32 pixels, and pictures after them; returns the file of annotations."""
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for row in range(rows + pictures):
        name = f"{row:03d}.{'mp4' if row < rows else 'png'}"
        if row < rows:
            write_clip(folder / name, frames=frames + row % 3, rate=8, size=(32, 32), gop=4)
        else:
            Image.fromarray(numbered_frame(row, 32, 32)).save(folder / name)
        words = [WORDS[(row * 3 + place * (row + 2)) % len(WORDS)] for place in range(2 + row % 4)]
        lines.append({"path": name, "cap": " ".join(words)})
    file = folder / "captions.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


def model_json(encoders: Path, task: str = "t2v", **changes: Any) -> dict[str, Any]:
    """model.json of a predictor from scratch; `do_sample` is the autoencoder's, other changes are keys of the top."""
    config = dict(_PREDICTOR)
    if task == "i2v":
        config |= {"in_channels": 12, "image_dim": 20, "added_kv_proj_dim": 24}
    content: dict[str, Any] = {
        "task": task,
        "ae": {"from_pretrained": str(encoders / "vae"), "do_sample": changes.pop("do_sample", False)},
        "text_encoder": {"from_pretrained": str(encoders / "text_encoder"), "dtype": "fp32", "max_length": 12},
        "predictor": {"model_id": "wan", "config": config, "train_from_scratch": True},
    }
    if task == "i2v":
        content["image_encoder"] = {"from_pretrained": str(encoders / "image_encoder")}
    return {**content, **changes}


def data_json(file: Path, **preprocess: Any) -> dict[str, Any]:
    """data.json of the clips of `write_clips`, or of the features in a folder."""
    of_features = file.is_dir()
    shape = {} if of_features else {"num_frames": 5, "max_height": 32, "max_width": 32}
    basic = {"data_path": str(file), "data_folder": str(file if of_features else file.parent)}
    return {
        "dataset_param": {
            "dataset_type": "feature" if of_features else "t2v",
            "basic_parameters": basic,
            "preprocess_parameters": {**shape, **preprocess},
        },
        "dataloader_param": {"shuffle": True, "drop_last": True},
    }
