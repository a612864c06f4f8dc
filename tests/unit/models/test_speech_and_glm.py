"""What Whisper, Qwen3-ASR and GLM-4.1V do with rows and batches that aren't the plain ones."""

from __future__ import annotations

import importlib
import json
import re
import wave
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoProcessor

from mindspeed_mm.configs.data_config import DatasetParam, PreprocessParameters
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.conversation.tokens import Tokenizer
from mindspeed_mm.data.loading.collate import Collator
from mindspeed_mm.data.media.media import DecodedVideo, Geometry
from mindspeed_mm.models.common.family import freeze_parts, require_packed_positions
from mindspeed_mm.models.transformers.adapters import find_adapter
from mindspeed_mm.utils.errors import BadSample, ConfigError, DataError
from tests.support.families import qwen3_asr, whisper

RATE = 16_000
SOUND = {"user": "<audio>", "assistant": "red green"}


@pytest.fixture(scope="module")
def whisper_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return whisper.make(tmp_path_factory.mktemp("whisper") / "hf")


@pytest.fixture(scope="module")
def asr_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return qwen3_asr.make(tmp_path_factory.mktemp("asr") / "hf")


def dataset_of(
    folder: Path, hf_dir: Path, turns: dict[str, Any], sounds: int = 1, basic: dict[str, Any] | None = None, **keys: Any
) -> Any:
    """A data set of one row; its sounds last five seconds."""
    for number in range(sounds):
        with wave.open(str(folder / f"{number}.wav"), "wb") as file:
            file.setparams((1, 2, RATE, 0, "NONE", ""))
            file.writeframes((np.random.RandomState(number).randn(5 * RATE) * 3000).astype("<i2").tobytes())
    Image.new("RGB", (8, 8)).save(folder / "0.png")
    messages = [
        {"role": role, **(turn if isinstance(turn, dict) else {"content": turn})} for role, turn in turns.items()
    ]
    images = ["0.png"] if "<image>" in str(turns) else []
    row = {"messages": messages, "images": images, "audios": [f"{number}.wav" for number in range(sounds)]}
    (folder / "data.json").write_text(json.dumps([row]))
    tags = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    columns = {"messages": "messages", "images": "images", "audios": "audios", "system_tag": "system"}
    param = {
        "dataset_type": "huggingface",
        "basic_parameters": {"dataset": str(folder / "data.json"), "dataset_dir": str(folder), **(basic or {})},
        "preprocess_parameters": {"model_name_or_path": str(hf_dir), **keys},
        "attr": {**tags, **columns, "formatting": "sharegpt"},
    }
    adapter = find_adapter(SimpleNamespace(model_id=None, init_from_hf_path=str(hf_dir)))
    return build_mm_dataset(DatasetParam.from_dict(param), adapter=adapter)


@pytest.mark.parametrize(
    "turns, sounds, found",
    [
        ({"user": "<audio>what is it", "assistant": "red"}, 1, "user with audio and text, assistant with text"),
        ({"user": "<audio><audio>", "assistant": "red"}, 2, "user with audio and audio, assistant with text"),
        ({"user": "what", "assistant": "red"}, 0, "user with text, assistant with text"),
        ({"system": "s", "user": "<audio>", "assistant": "red"}, 1, "system with text, user with audio, assistant"),
        ({"user": "<image>", "assistant": "red"}, 0, "user with image, assistant with text"),
    ],
)
def test_whisper_takes_a_sound_and_its_transcript(
    turns: dict[str, str], sounds: int, found: str, whisper_dir: Path, tmp_path: Path
) -> None:
    """Anything else is refused with what the row has."""
    with pytest.raises(BadSample, match=f"one sound and no text.* the row has: {found}"):
        dataset_of(tmp_path, whisper_dir, turns, sounds)[0]


def test_whisper_cuts_a_sound_to_its_window(whisper_dir: Path, tmp_path: Path, said: list[str]) -> None:
    """Five seconds before a window of two: the first two are heard, and it is said."""
    dataset = dataset_of(tmp_path, whisper_dir, SOUND)
    features = dataset[0]["input_features"]
    sound = np.random.RandomState(0).randn(5 * RATE) * 3000
    window = sound.astype("<i2")[: 2 * RATE].astype(np.float32) / 32768
    extractor = AutoProcessor.from_pretrained(whisper_dir).feature_extractor
    assert torch.equal(features, torch.as_tensor(extractor(window, sampling_rate=RATE)["input_features"]))
    assert any("lasts 5.0 s; the model takes 2 s" in message for message in said)


def test_whisper_leaves_out_a_transcript_that_is_too_long(whisper_dir: Path, tmp_path: Path) -> None:
    """More tokens than the decoder has positions: a filler, which goes into a batch beside other rows."""
    dataset = dataset_of(tmp_path, whisper_dir, {"user": "<audio>", "assistant": "red " * 400})
    assert dataset.measure(0)[0].tokens == 0
    left_out = dataset[0]
    assert "256 fit, and nothing is trained" in str(left_out["note"]) and (left_out["labels"] == -100).all()
    (tmp_path / "other").mkdir()
    other = dataset_of(tmp_path / "other", whisper_dir, SOUND)
    collate = Collator(
        other.adapter, SimpleNamespace(pad_to_multiple_of=None, pad_id=None, ignore_pad_token_for_loss=1), other
    )  # type: ignore[arg-type]
    batch = collate([other[0], left_out])
    assert batch["input_features"].shape == (2, 24, 200) and batch["num_rows"] == 1


def test_whisper_targets(whisper_dir: Path, tmp_path: Path) -> None:
    """The prompt is no target unless asked for; an answer flagged off isn't one; nothing else moves the ids."""
    plain = dataset_of(tmp_path, whisper_dir, SOUND)[0]
    assert (plain["labels"] == -100).tolist() == [True] * 4 + [False] * (len(plain["labels"]) - 4)
    prompt = dataset_of(tmp_path, whisper_dir, SOUND, basic={"train_on_prompt": True})[0]
    assert torch.equal(prompt["labels"], plain["input_ids"])
    dataset = dataset_of(tmp_path, whisper_dir, SOUND)
    conversation = dataset.source.read(0)
    conversation.messages[1].train = False  # as a stream may bring it: other rows without a target are left out before
    prepared = dataset.encoder.prepare(conversation, SimpleNamespace(look=lambda ref: None))[0]
    assert (prepared.labels == -100).all() and prepared.ids.tolist() == plain["input_ids"].tolist()


def test_whisper_typed_tokens(whisper_dir: Path, tmp_path: Path) -> None:
    """A special token in a transcript stands for itself, or is spelt out where that is asked for."""
    turns = {"user": "<audio>", "assistant": "red <|en|>"}
    itself = dataset_of(tmp_path, whisper_dir, turns)[0]["input_ids"].tolist()
    spelt = dataset_of(tmp_path, whisper_dir, turns, split_special_tokens=True)[0]["input_ids"].tolist()
    assert itself.count(itself[1]) == 2 and spelt.count(itself[1]) == 1 and len(spelt) > len(itself)


def test_whisper_says_that_a_template_has_no_effect(whisper_dir: Path, tmp_path: Path, said: list[str]) -> None:
    """The key is accepted with a notice."""
    named = dataset_of(tmp_path, whisper_dir, SOUND, basic={"template": "qwen2vl"})[0]
    assert torch.equal(named["input_ids"], dataset_of(tmp_path, whisper_dir, SOUND)[0]["input_ids"])
    assert any("template has no effect" in message for message in said)


def test_whisper_model(whisper_dir: Path) -> None:
    """Packs are refused; sinusoids stay frozen; transformers' own arguments still work; a batch needs sound."""
    from mindspeed_mm.models.common.modelzoo import ModelHub
    from mindspeed_mm.models.transformers_model import load_hf_config, load_pretrained

    config = load_hf_config(str(whisper_dir))
    model_class: Any = ModelHub.get("whisper", config)
    model = load_pretrained(model_class, config, str(whisper_dir)).eval()
    with pytest.raises(ConfigError, match="can't train on packed rows"):
        require_packed_positions(model.traits, "Whisper")
    freeze_parts(model, model.traits, {"audio_encoder": False})
    assert [n for n, p in model.named_parameters() if not p.requires_grad] == ["model.encoder.embed_positions.weight"]
    freeze_parts(model, model.traits, {"audio_encoder": True})
    assert {n.split(".")[1] for n, p in model.named_parameters() if not p.requires_grad} == {"encoder"}
    features, ids = torch.randn(1, 24, 200), torch.tensor([[5, 6, 7]])
    ours, own = model(input_features=features, input_ids=ids), model(features, decoder_input_ids=ids)
    assert torch.equal(ours.logits, own.logits)
    assert model.generate(features, max_new_tokens=2, min_new_tokens=2).shape[0] == 1
    with pytest.raises(DataError, match="needs a sound in every row"):
        model.traits.towers[0].run_dummy(model, torch.device("cpu"))


def test_qwen3_asr_takes_one_sound(asr_dir: Path, tmp_path: Path) -> None:
    """Whole, however long it is; the processor refuses a second one."""
    sample = dataset_of(tmp_path, asr_dir, SOUND)[0]
    assert sample["input_features_mask"].shape == (1, 500) and bool(sample["input_features_mask"].all())
    turns = {"user": "<audio><audio>", "assistant": "red"}
    with pytest.raises(BadSample, match="must match 1:1"):
        dataset_of(tmp_path, asr_dir, turns, sounds=2)[0]


@pytest.mark.parametrize(
    "name, geometry, expected",
    [
        ("glm4v", Geometry("video", 56, 56, frames=6, fps=1.5), [0, 1, 2]),
        ("glm4v", Geometry("image", 56, 84), None),
        ("qwen2_audio", Geometry("audio", samples=20_480), None),
        ("qwen2_audio", Geometry("audio", samples=1_120), None),
        ("qwen3_asr", Geometry("audio", samples=20_481), None),
    ],
)
def test_sizes_are_foreseen(name: str, geometry: Geometry, expected: list[int] | None, tmp_path: Path) -> None:
    """What is foreseen is believed, so that nothing is decoded to be measured; and it is what the processor writes."""
    hf_dir = importlib.import_module(f"tests.support.families.{name}").make(tmp_path / "hf")
    adapter = find_adapter(SimpleNamespace(init_from_hf_path=str(hf_dir)))
    processor = adapter.load_processor(str(hf_dir), PreprocessParameters(model_name_or_path=str(hf_dir)))
    tokenizer = Tokenizer(processor, adapter, {})
    foreseen = tokenizer.foresee(geometry)
    assert foreseen is not None
    if geometry.kind == "video":
        assert [int(second) for second in re.findall(r"\d+", foreseen.text)] == expected
        content: Any = DecodedVideo(np.zeros((6, 56, 56, 3), np.uint8), geometry.timestamps, 1.5, 1.5, 6)
    elif geometry.kind == "image":
        content = Image.new("RGB", (geometry.width, geometry.height))
    else:
        content = np.zeros(geometry.samples, np.float32)
    assert tokenizer.process([(geometry.kind, content)])[1] == [foreseen.text]


@pytest.mark.parametrize(
    "media, why",
    [({"image_grid_thw": torch.ones(1, 3)}, "say where"), ({"pixel_values_videos": torch.ones(4, 12)}, "mark")],
    ids=["an image among text", "a video among images"],
)
def test_glm_media_need_types(media: dict[str, torch.Tensor], why: str) -> None:
    from mindspeed_mm.models.transformers.glm4v.batches import glm4v_tower_pass

    with pytest.raises(DataError, match=f"mm_token_type_ids.*{why}"):
        glm4v_tower_pass(None, {"input_ids": torch.ones(1, 4, dtype=torch.int64), **media})
