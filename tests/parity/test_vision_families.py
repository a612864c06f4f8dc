"""What the common tests of families don't reach: towers in full, media in order, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.configs.data_config import DatasetParam, PreprocessParameters
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.media.media import Geometry
from mindspeed_mm.data.media.stacking import stack_media
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.models.transformers.gemma3.batches import packed_masks
from mindspeed_mm.models.transformers.gemma3.data import ADAPTER as GEMMA
from mindspeed_mm.models.transformers.llava.data import ADAPTER as LLAVA
from mindspeed_mm.models.transformers_model import load_hf_config
from mindspeed_mm.utils.errors import ConfigError, DataError
from tests.support.families import families
from tests.support.launch import write_run_files

FAMILIES = families()
SEEING = {
    "llava",
    "llava_next",
    "llava_onevision",
    "internvl",
    "gemma3",
    "mistral3",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "gemma4_moe",
    "ernie4_5_vl_moe",
}


def write_picture(path: Path, height: int, width: int, seed: int) -> str:
    """Write a picture of noise; returns its name."""
    pixels = np.random.RandomState(seed).randint(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path.name


def samples_of(hf_dir: Path, folder: Path, rows: list[dict[str, Any]]) -> list[dict[str, torch.Tensor]]:
    """The samples of rows whose media lie in `folder`."""
    file = folder / "data.json"
    file.write_text(json.dumps(rows))
    columns = {f"dataset_param.attr.{name}": name for name in ("images", "videos")}
    files = write_run_files(folder / "files", hf_dir, file, data=columns)
    param = json.loads(files["data.json"].read_text())["dataset_param"]
    model = type("Model", (), {"model_id": None, "init_from_hf_path": hf_dir})
    dataset = build_mm_dataset(DatasetParam.from_dict(param), adapter=find_adapter(model))
    return [dataset[number] for number in range(len(rows))]


def question(text: str, images: list[str], videos: list[list[str]]) -> dict[str, Any]:
    """A row of one turn."""
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "the answer"}]
    return {"messages": messages, "images": images, "videos": videos}


@pytest.mark.parametrize("name", sorted(SEEING))
def test_dummies_reach_what_media_reach(name: str, tmp_path: Path) -> None:
    """The towers' smallest inputs give gradients to the weights that real media do; no other weight is left out."""
    hf_dir = FAMILIES[name].make(tmp_path / "hf")
    (tmp_path / "rows").mkdir()
    images = [write_picture(tmp_path / "rows/a.png", 50, 70, 1)]
    frames = [write_picture(tmp_path / f"rows/{n}.png", 40, 40, n) for n in range(2)]
    has_video = "video" in FAMILIES[name].kinds
    row = question("see <image>" + "<video>" * has_video, images, [frames] * has_video)
    (sample,) = samples_of(hf_dir, tmp_path / "rows", [row])
    config = load_hf_config(str(hf_dir))
    model: Any = ModelHub.get(None, config).from_pretrained(hf_dir)  # type: ignore[attr-defined]
    (tower, *_) = towers = model.traits.towers
    inputs = {key: value for key, value in sample.items() if key != "labels"}
    per_token = {"input_ids", "mm_token_type_ids", "token_type_ids"}
    inputs = {key: value[None] if key in per_token else value for key, value in inputs.items()}
    model(**inputs).logits.square().sum().backward()
    language = {id(p) for p in model.get_submodule(model.traits.language_model).parameters()}
    language |= {id(p) for p in model.get_output_embeddings().parameters()}
    names = {n for n, p in model.named_parameters() if id(p) not in language}
    reached = {n for n, p in model.named_parameters() if n in names and p.grad is not None}
    assert {id(p) for p in tower.parameters(model)} == {id(p) for n, p in model.named_parameters() if n in names}
    model.zero_grad(set_to_none=True)
    torch.stack([t.run_dummy(model, torch.device("cpu")).square().sum() for t in towers]).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == reached


def test_internvl_keeps_the_order_of_tiles_and_frames(tmp_path: Path) -> None:
    """Clips of different lengths between pictures: rows of pixel_values follow each other as their tokens do."""
    from transformers import AutoProcessor

    hf_dir = FAMILIES["internvl"].make(tmp_path / "hf")
    rows = tmp_path / "rows"
    rows.mkdir()
    images = [write_picture(rows / f"image{n}.png", height, 64, n) for n, height in enumerate((30, 130))]
    clips = [[write_picture(rows / f"{c}_{n}.png", 48, 48, 10 * c + n) for n in range(c)] for c in (2, 3)]
    (sample,) = samples_of(hf_dir, rows, [question("a <video> b <image> c <video> d <image>", images, clips)])
    processor = AutoProcessor.from_pretrained(hf_dir)
    expected = []
    for medium in (clips[0], images[0], clips[1], images[1]):
        if isinstance(medium, str):
            made = processor(text=["<IMG_CONTEXT>"], images=[Image.open(rows / medium)], return_tensors="pt")
        else:
            frames = np.stack([np.asarray(Image.open(rows / frame)) for frame in medium])
            made = processor(text=["<video>"], videos=[frames], return_tensors="pt")
        expected.append(made["pixel_values"])
    assert torch.equal(sample["pixel_values"], torch.cat(expected))
    tokens = int((sample["input_ids"] == processor.image_token_id).sum())
    assert tokens == processor.image_seq_length * len(sample["pixel_values"])


def test_gemma_foresees_parts_of_pictures(tmp_path: Path) -> None:
    """Pan and scan: the parts that a picture is cut into are known from its shape."""
    hf_dir = FAMILIES["gemma3"].make(tmp_path / "hf")
    options = PreprocessParameters(model_name_or_path=str(hf_dir), image_do_pan_and_scan=True)
    processor = GEMMA.load_processor(str(hf_dir), options)
    found = []
    for height, width in [(300, 900), (900, 300), (300, 310), (100, 400), (513, 777), (256, 1024)]:
        foreseen = GEMMA.foresee(processor, Geometry("image", height, width))
        picture = Image.new("RGB", (width, height))
        asked = {"do_pan_and_scan": True}
        whole = processor(text=["<start_of_image>"], images=[picture], images_kwargs=asked, return_tensors="pt")
        assert foreseen is not None and foreseen.rows == len(whole["pixel_values"])
        assert processor.tokenizer(foreseen.text).input_ids == whole["input_ids"][0].tolist()
        found.append(foreseen.rows)
    assert max(found) > 2 and min(found) == 1


def test_gemma_refuses_attention_that_splits_pictures(tmp_path: Path) -> None:
    """Flash attention takes no mask for pictures; a window smaller than a picture can't be packed."""
    config = load_hf_config(str(FAMILIES["gemma3"].make(tmp_path / "hf")))
    config.text_config.sliding_window = 15
    with torch.device("meta"):
        model = ModelHub.get(None, config)._from_config(config)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"a picture takes 16 tokens.*more than sliding_window 15"):
        packed_masks(model, {})
    config.text_config._attn_implementation = "flash_attention_2"
    with pytest.raises(ConfigError, match=r"flash attention takes no mask.*sdpa in model.json"):
        ModelHub.get(None, config)(config)


@pytest.mark.parametrize(
    "model_type, instead", [("internvl_chat", "OpenGVLab/InternVL3_5-30B-A3B-HF"), ("llava_qwen", "llava-hf/")]
)
def test_layouts_of_authors_code_are_refused(model_type: str, instead: str, tmp_path: Path) -> None:
    """The sentence says which checkpoint to take."""
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": model_type, "architectures": ["InternVLChatModel"]})
    )
    with pytest.raises(ConfigError, match=instead):
        load_hf_config(str(tmp_path))


def test_llava_refuses_a_processor_of_pixtral(tmp_path: Path) -> None:
    """Its pictures have no size in common."""
    hf_dir = FAMILIES["mistral3"].make(tmp_path / "hf")
    with pytest.raises(ConfigError, match="PixtralProcessor isn't adapted"):
        LLAVA.load_processor(str(hf_dir), PreprocessParameters(model_name_or_path=str(hf_dir)))


def test_media_of_different_shapes_are_filled_up_or_refused() -> None:
    """Zeros at the end where the adapter allows it; a sentence where not."""
    parts = [{"a": torch.ones(1, 2, 3)}, {}, {"a": torch.ones(2, 4, 1)}]
    filled = stack_media(parts, ["a"], ["a"])["a"]
    assert filled.shape == (3, 4, 3) and filled.sum() == 14
    assert filled[0, :2].eq(1).all() and filled[1:, :, 0].eq(1).all()
    with pytest.raises(DataError, match=r"'a' of different shapes \(\[1, 2, 3\], \[2, 4, 1\]\)"):
        stack_media(parts, ["a"])
