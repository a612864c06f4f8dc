"""Features and CLIP scores with a tiny CLIP, against the model's own parts."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.tasks.generation import evaluation
from mindspeed_mm.tasks.generation.distances import read_features
from mindspeed_mm.tasks.generation.outputs import SampleFolder
from mindspeed_mm.utils.errors import CheckpointError, DataError
from tests.support.tiny_wan import write_encoders

PROMPTS = ("a cat", "a red dog runs")


@pytest.fixture(scope="module")
def clip(tmp_path_factory):
    from transformers import AutoTokenizer, CLIPConfig, CLIPImageProcessor, CLIPModel

    folder = tmp_path_factory.mktemp("clip")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = CLIPConfig(
            text_config={**sizes, "vocab_size": 32, "max_position_embeddings": 8, "eos_token_id": 1, "pad_token_id": 0},
            vision_config={**sizes, "image_size": 16, "patch_size": 8},
            projection_dim=6,
        )
        CLIPModel(config).save_pretrained(folder)
    CLIPImageProcessor(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}).save_pretrained(folder)
    encoders = write_encoders(tmp_path_factory.mktemp("encoders"))
    AutoTokenizer.from_pretrained(encoders / "tokenizer").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    root = tmp_path_factory.mktemp("samples")
    folder = SampleFolder(root)
    random = np.random.default_rng(0)
    pictures = [random.integers(0, 256, (1, 20, 24, 3), dtype=np.uint8) for _ in PROMPTS]
    names = [f"{number}.png" for number in range(len(PROMPTS))]
    for name, prompt, picture in zip(names, PROMPTS, pictures):
        folder.write(picture, {"file": name, "prompt": prompt, "index": 0, "sample": 0}, 8)
    folder.write_index(names)
    return root, [picture[0] for picture in pictures]


def _expected(clip, pictures):
    """By the towers and projections themselves."""
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPModel

    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPImageProcessor.from_pretrained(clip)
    tokenizer = AutoTokenizer.from_pretrained(clip)
    with torch.no_grad():
        pixels = processor(images=[Image.fromarray(p) for p in pictures], return_tensors="pt").pixel_values
        seen = model.visual_projection(model.vision_model(pixels).pooler_output)
        told = [model.text_model(**tokenizer([p], return_tensors="pt")).pooler_output for p in PROMPTS]
        told = model.text_projection(torch.cat(told))
    return seen, [100 * float(s @ t / s.norm() / t.norm()) for s, t in zip(seen, told)]


def test_clip_scores_are_cosines(clip, samples, tmp_path, capsys):
    root, pictures = samples
    _, expected = _expected(clip, pictures)
    output = tmp_path / "out.json"
    assert evaluation.main(["--samples", str(root), "--clip", str(clip), "--output", str(output)]) == 0
    figures = json.loads(output.read_text())
    assert [score["clip_score"] for score in figures["clip_scores"]] == pytest.approx(expected, rel=1e-4)
    assert abs(expected[0] - expected[1]) > 0.01
    assert figures["clip_score"] == pytest.approx(sum(expected) / 2, rel=1e-4)
    assert "clip_score" in capsys.readouterr().out


def test_features_of_a_folder(clip, samples, tmp_path):
    root, pictures = samples
    seen, _ = _expected(clip, pictures)
    output = tmp_path / "f.safetensors"
    assert evaluation.main(["features", "--model", str(clip), "--media", str(root), "--output", str(output)]) == 0
    np.testing.assert_allclose(read_features(output), seen.numpy(), rtol=1e-4, atol=1e-5)


def test_messages(clip, samples, tmp_path):
    with pytest.raises(DataError, match=r"no samples\.jsonl"):
        evaluation.main(["--samples", str(tmp_path), "--clip", str(clip)])
    with pytest.raises(CheckpointError, match="does not exist"):
        evaluation.main(["--samples", str(samples[0]), "--clip", str(tmp_path / "none")])
    (tmp_path / "samples.jsonl").write_text('{"file": "x.png"}\n')
    with pytest.raises(DataError, match="line 1: expected an object with file and prompt"):
        evaluation.main(["--samples", str(tmp_path), "--clip", str(clip)])
