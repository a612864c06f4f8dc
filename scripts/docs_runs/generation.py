"""docs/data.md's features and docs/inference.md: a tiny Wan, its clips, and a run folder with random weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from scripts.docs_runs.common import DocumentError, Done, exchange, fences, items, key, page_of, preload, start

#: what the page says → what is run in its place
SMALLEST = {
    "--size 1 256 256": "--size 1 16 16",
    "--num-inference-steps 30": "--num-inference-steps 2",
    "--num-samples-per-prompt 4": "--num-samples-per-prompt 2",
}


def run() -> Done:
    """Make features; then make samples, and figures about them."""
    from tests.support.tiny_wan import write_encoders

    preload(
        "torch.distributed", "transformers.models.umt5.modeling_umt5", "diffusers.models.transformers.transformer_wan"
    )
    encoders = write_encoders(Path("encoders").resolve())
    done = features(page_of("data.md"), encoders)
    return done | inference(page_of("inference.md"), encoders)


def features(page: Path, encoders: Path) -> Done:
    """Both commands make features of the same clips: the same ones."""
    from tests.support.tiny_wan import data_json, model_json, write_clips

    clips = write_clips(Path("clips").resolve(), rows=2)
    tools = {"sorafeature": {"save_path": "by_torchrun"}}
    for name, content in {"model": model_json(encoders), "data": data_json(clips), "tools": tools}.items():
        Path(f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    commands = [c for snippet in fences(page, "bash") for c in items(snippet) if "data convert" not in c]
    for command in commands:
        start(command, page, ranks=1)
    made, by_torchrun = (
        {str(f.relative_to(folder)): f.read_bytes() for f in Path(folder).rglob("*.safetensors")}
        for folder in ("features", "by_torchrun")
    )
    if not made or made != by_torchrun:
        raise DocumentError(f"{page.name}: the commands make other features: {sorted(made)}, {sorted(by_torchrun)}")
    return {key(page, command) for command in commands}


def inference(page: Path, encoders: Path) -> Done:
    """Sample from a run folder by command and from Python, and evaluate the samples."""
    from PIL import Image

    from tests.support.clips import numbered_frame
    from tests.support.generation_runs import write_prompts, write_run

    made = write_run(Path("trained"), encoders, pixel=True)
    Path("runs").mkdir()
    made.folder.rename("runs/my_run")
    shutil.copy(made.model_json, "model.json")
    write_prompts(Path())
    first, shared, *figures = [item for snippet in fences(page, "bash")[1:] for item in items(snippet)]
    command = exchange(first, SMALLEST, page)
    start(command, page)
    flags = command.partition("inference_sora.py")[2].replace("--save-path samples", "--save-path shared")
    start(exchange(shared, {" …": flags}, page), page, ranks=2)
    pictures, by_two = (
        {f.name: f.read_bytes() for f in sorted(Path(folder).glob("sample_*.png"))} for folder in ("samples", "shared")
    )
    if len(pictures) != 6 or pictures != by_two:
        raise DocumentError(f"{page.name}: the samples are not the same: {sorted(pictures)}, {sorted(by_two)}")
    (_, python) = fences(page, "python")
    names: dict[str, object] = {"__name__": python.place}
    exec(compile(python.text, python.place, "exec"), names)
    shapes = [frames.shape for frames in names["frames"]]  # type: ignore[attr-defined]
    if shapes != [(1, 32, 32, 3)]:
        raise DocumentError(f"{python.place}: frames of shape {shapes}")
    Path("real_pictures").mkdir()
    for number in range(6):
        Image.fromarray(numbered_frame(number, 16, 16)).save(f"real_pictures/{number}.png")
    write_seers(encoders / "tokenizer")
    for command in figures:
        start(command, page)
    if "frechet_distance" not in json.loads(Path("figures.json").read_text(encoding="utf-8")):
        raise DocumentError(f"{page.name}: figures.json holds no Fréchet distance")
    return {key(page, item) for item in (first, shared, python.text, *figures)}


def write_seers(tokenizer: Path) -> None:
    """Tiny models of DINOv2 and CLIP under the names that the page gives them."""
    from transformers import (
        AutoTokenizer,
        BitImageProcessor,
        CLIPConfig,
        CLIPImageProcessor,
        CLIPModel,
        Dinov2Config,
        Dinov2Model,
    )

    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    patches = {"image_size": 16, "patch_size": 8}
    how = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    Dinov2Model(Dinov2Config(**sizes, **patches)).save_pretrained("DINOV2_DIR")
    BitImageProcessor(**how).save_pretrained("DINOV2_DIR")
    text = {"vocab_size": 32, "max_position_embeddings": 16, "eos_token_id": 1, "pad_token_id": 0}
    sizes["intermediate_size"] = 16
    clip = CLIPConfig(text_config={**sizes, **text}, vision_config={**sizes, **patches}, projection_dim=6)
    CLIPModel(clip).save_pretrained("CLIP_DIR")
    CLIPImageProcessor(**how).save_pretrained("CLIP_DIR")
    AutoTokenizer.from_pretrained(tokenizer).save_pretrained("CLIP_DIR")
