"""Text encoders from directories: states are those of the pipeline that was built by hand from the same parts."""

from __future__ import annotations

import json

import pytest
import torch

from mindspeed_mm.configs.sora_config import SoRAModelConfig
from mindspeed_mm.models.generation.predictor.family import families
from mindspeed_mm.models.generation.text_encoder.captions import open_captions
from mindspeed_mm.models.generation.text_encoder.loading import PUBLISHED_TEXT_ENCODERS
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from tests.support import tiny_image_pipelines as pictures
from tests.support import tiny_video_pipelines as videos
from tests.support.predictors import cases

CPU = torch.device("cpu")
CAPTIONS = [*videos.CAPTIONS, ""]
#: label of a case → its pipeline, published model_id's of its encoders
PIPELINES = {
    "wan-t2v": (pictures.wan, ["UMT5"]),
    "flux-t2i": (pictures.flux, ["CLIP", "T5"]),
    "sd3-t2i": (pictures.sd3, ["CLIPWithProjection", "CLIPWithProjection", "T5"]),
    "qwenimage-t2i": (pictures.qwenimage, ["Hunyuan15MLLmModel"]),
    "hunyuanvideo-t2v": (videos.hunyuanvideo, ["HunyuanMLLmModel", "CLIP"]),
    "hunyuanvideo15-t2v": (lambda: videos.hunyuanvideo15("t2v"), ["Hunyuan15MLLmModel", "Hunyuan15GlyphModel"]),
    "cogvideox-t2v": (lambda: videos.cogvideox("cogvideox-t2v"), ["T5"]),
    "ltx-t2v": (lambda: videos.ltx("t2v"), ["Auto"]),
}
LENGTH = 10


def _family(label):
    name, case = cases()[label]
    return families()[name](case.task, case.config)


def _store(pipeline, folder):
    """Write encoders and tokenizers; return what model.json says of them."""
    described = []
    for number in range(sum(n.startswith("text_encoder") for n in pipeline.components)):
        suffix = f"_{number + 1}" if number else ""
        pipeline.components[f"text_encoder{suffix}"].save_pretrained(folder / f"text_encoder{suffix}")
        pipeline.components[f"tokenizer{suffix}"].save_pretrained(folder / f"tokenizer{suffix}")
        described.append(
            {"from_pretrained": str(folder / f"text_encoder{suffix}"), "dtype": "fp32", "max_length": LENGTH}
        )
    return described


def _open(label, encoders, tokenizers=(), **more):
    config = SoRAModelConfig.from_dict({"text_encoder": encoders, **more})
    return open_captions(config, _family(label), list(tokenizers))


def _as_by_hand(encoder, pipeline):
    """Settings that the tests' pipelines have because their vocabulary is tiny."""
    for name in ("prompt_template_encode_start_idx", "tokenizer_max_length", "tokenizer_2_max_length"):
        if hasattr(pipeline, name):
            setattr(encoder.pipeline, name, getattr(pipeline, name))
    return encoder


@pytest.mark.parametrize("label", PIPELINES)
def test_states_are_the_pipelines(label, tmp_path):
    torch.manual_seed(0)
    make, model_ids = PIPELINES[label]
    pipeline, family = make(), _family(label)
    described = _store(pipeline, tmp_path)
    for encoder, model_id in zip(described, model_ids, strict=True):
        encoder["model_id"] = model_id
    opened = _as_by_hand(_open(label, described[0] if len(described) == 1 else described), pipeline)
    states = opened.encode(CAPTIONS, CPU)
    with torch.no_grad():
        expected = family.text_states(pipeline, CAPTIONS, CPU, LENGTH)
    assert states.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(states[name], value, rtol=1e-6, atol=1e-6)
        assert len(value) == len(CAPTIONS)
        assert not states[name].requires_grad
    assert len(opened.encoders) == len(described)
    for encoder, theirs in zip(opened.encoders, (getattr(pipeline, n) for n in _slots(pipeline)), strict=True):
        assert type(encoder) is type(theirs)
        assert not encoder.training and not any(p.requires_grad for p in encoder.parameters())


def _slots(pipeline):
    return sorted(name for name in pipeline.components if name.startswith("text_encoder"))


@pytest.mark.parametrize("label", ["flux-t2i", "wan-t2v"])
def test_a_whole_pipelines_folder(label, tmp_path):
    torch.manual_seed(0)
    pipeline = PIPELINES[label][0]()
    pipeline.save_pretrained(tmp_path)
    encoder = {"from_pretrained": str(tmp_path / "text_encoder"), "dtype": "fp32"}
    for listed in ([], [encoder]):
        opened = _open(label, listed, init_from_diffusers=str(tmp_path))
        assert [type(e) for e in opened.encoders] == [type(getattr(pipeline, n)) for n in _slots(pipeline)]
        # what model.json doesn't describe computes in bf16
        assert opened.encoders[0].dtype == (torch.float32 if listed else torch.bfloat16)
        assert opened.encoders[-1].dtype == (torch.float32 if listed and label == "wan-t2v" else torch.bfloat16)
        assert len(opened.encode([""], CPU)["encoder_hidden_states"]) == 1


def test_the_folders_index_says_the_class(tmp_path):
    """It is taken at its word, as diffusers takes it when it loads the pipeline."""
    pipeline = pictures.wan()
    described = _store(pipeline, tmp_path)
    index = {"_class_name": "WanPipeline", "text_encoder": ["transformers", "UMT5ForConditionalGeneration"]}
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"has no weights for .* of UMT5ForConditionalGeneration"):
        _open("wan-t2v", described)


def test_an_encoder_out_of_an_encoder_and_decoder(tmp_path):
    """Directories of the hub hold whole T5 models: the encoder is taken out of one."""
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    pipeline = videos.ltx("t2v")
    described = _store(pipeline, tmp_path)
    sizes = {"d_model": 12, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    whole = T5ForConditionalGeneration(T5Config(vocab_size=len(videos.WORDS), decoder_start_token_id=0, **sizes))
    whole.save_pretrained(tmp_path / "text_encoder")
    opened = _open("ltx-t2v", described)
    assert type(opened.encoders[0]).__name__ == "T5EncoderModel"
    torch.testing.assert_close(opened.encoders[0].shared.weight, whole.shared.weight)
    # Wan's pipeline is written for UMT5, and takes another encoder as well
    assert type(_open("wan-t2v", described).encoders[0]).__name__ == "T5EncoderModel"


def test_words_out_of_a_model_of_words_and_pictures(tmp_path):
    torch.manual_seed(0)
    pipeline = videos.hunyuanvideo15("t2v")
    described = _store(pipeline, tmp_path)
    whole = pictures.qwen(12)
    whole.save_pretrained(tmp_path / "text_encoder")
    opened = _open("hunyuanvideo15-t2v", [{**described[0], "model_id": "Hunyuan15MLLmModel"}, described[1]])
    assert type(opened.encoders[0]).__name__ == "Qwen2_5_VLTextModel"
    torch.testing.assert_close(opened.encoders[0].embed_tokens.weight, whole.model.language_model.embed_tokens.weight)


def test_weights_that_are_not_there(tmp_path):
    pipeline = pictures.sd3()
    described = _store(pipeline, tmp_path)
    pictures.clip(4).save_pretrained(tmp_path / "text_encoder")
    with pytest.raises(CheckpointError, match=r"has no weights for text_projection\.weight of CLIPTextModelWithProj"):
        _open("sd3-t2i", described)


def test_precision_and_names_of_classes(tmp_path):
    pipeline = pictures.wan()
    described = _store(pipeline, tmp_path)[0]
    opened = _open("wan-t2v", {**described, "dtype": "bf16", "model_id": "UMT5EncoderModel"})
    assert opened.encode(CAPTIONS, CPU)["encoder_hidden_states"].dtype == torch.bfloat16
    for model_id, said in (
        ("UMT", r"'model_id' is 'UMT'; expected one of UMT5, .*did you mean 'UMT5'"),
        ("CLIP", r"'CLIP' \(CLIPTextModel\), but '.*' holds a UMT5EncoderModel \(model_type 'umt5'\)"),
        ("CLIPTextModel", r"'CLIPTextModel' \(model_type 'clip_text_model'\), but '.*' holds model_type 'umt5'"),
        ("AutoTokenizer", r"'model_id' is 'AutoTokenizer'; expected one of UMT5"),
    ):
        with pytest.raises(ConfigError, match=said):
            _open("wan-t2v", {**described, "model_id": model_id})
    assert set(PUBLISHED_TEXT_ENCODERS) == {
        *("UMT5", "T5", "MT5", "CLIP", "CLIPWithProjection", "Auto"),
        *("HunyuanMLLmModel", "Hunyuan15MLLmModel", "Hunyuan15GlyphModel"),
    }


def test_directories_and_numbers(tmp_path):
    pipeline = pictures.flux()
    described = _store(pipeline, tmp_path)
    missing = {"from_pretrained": str(tmp_path / "nowhere")}
    for listed, said in (
        (described[:1], r"'text_encoder' lists 1 encoder; FluxPipeline takes 2: CLIPTextModel, T5EncoderModel"),
        ([*described, described[0]], r"'text_encoder' lists 3 encoders; FluxPipeline takes 2"),
        ([], r"'text_encoder' lists 0 encoders; FluxPipeline takes 2"),
        ([described[0], missing], r"'text_encoder\[1\]': '.*nowhere' has no config.json; expected the directory"),
        ([described[0], {}], r"'text_encoder\[1\]': 'from_pretrained' is missing"),
    ):
        with pytest.raises(ConfigError, match=said):
            _open("flux-t2i", listed)


def test_tokenizers(tmp_path):
    """model.json's, else data.json's, else the folder beside the encoder, else the encoder's own."""
    pipeline = pictures.wan()
    described = _store(pipeline, tmp_path)[0]
    (tmp_path / "tokenizer").rename(tmp_path / "words")
    with pytest.raises(ConfigError, match=r"no tokenizer for 'text_encoder\[0\]' in '.*tokenizer', '.*text_encoder'"):
        _open("wan-t2v", described)
    words = str(tmp_path / "words")
    expected = _open("wan-t2v", {**described, "tokenizer": words}).encode(CAPTIONS, CPU)
    by_data = _open("wan-t2v", described, [words]).encode(CAPTIONS, CPU)
    torch.testing.assert_close(by_data, expected)
    with pytest.raises(ConfigError, match=r"no tokenizer for 'text_encoder\[0\]' in '.*nowhere'"):
        _open("wan-t2v", described, [str(tmp_path / "nowhere")])
    pipeline.tokenizer.save_pretrained(tmp_path / "text_encoder")
    torch.testing.assert_close(_open("wan-t2v", described).encode(CAPTIONS, CPU), expected)


def _glyph_checkpoint(encoder, folder, start="module.text_tower.encoder.", rows=16):
    """Other weights for a pipeline's glyph encoder, with rows for marks of colours and fonts behind the bytes."""
    tensors = {name: torch.randn_like(tensor) for name, tensor in encoder.encoder.state_dict().items()}
    tensors["embed_tokens.weight"] = torch.randn(encoder.config.vocab_size + rows, encoder.config.d_model)
    file = folder / "byt5_model.pt"
    torch.save({"state_dict": {start + name: tensor for name, tensor in tensors.items()}, "epoch": 1}, file)
    return file, tensors


@pytest.mark.parametrize("start", ["module.text_tower.encoder.", "encoder.", ""])
def test_weights_of_a_glyph_checkpoint_take_the_place_of_the_directory_s(start, tmp_path):
    pipeline = videos.hunyuanvideo15("t2v")
    described = _store(pipeline, tmp_path)
    file, tensors = _glyph_checkpoint(pipeline.text_encoder_2, tmp_path, start)
    described[1] |= {"model_id": "Hunyuan15GlyphModel", "byT5_ckpt_path": str(file)}
    loaded = _open("hunyuanvideo15-t2v", described).encoders[1]
    for name, tensor in loaded.encoder.state_dict().items():
        torch.testing.assert_close(tensor, tensors[name])
    words = torch.tensor([[5, 380]])
    torch.testing.assert_close(loaded.get_input_embeddings()(words), tensors["embed_tokens.weight"][words])


def test_a_file_that_is_no_glyph_checkpoint_is_told(tmp_path):
    pipeline = videos.hunyuanvideo15("t2v")
    described = _store(pipeline, tmp_path)
    file, tensors = _glyph_checkpoint(pipeline.text_encoder_2, tmp_path)
    described[1]["byT5_ckpt_path"] = str(file)
    file.write_bytes(b"nothing")
    with pytest.raises(CheckpointError, match=r"byT5_ckpt_path .* can't be read as a file of tensors"):
        _open("hunyuanvideo15-t2v", described)
    torch.save({"weight": torch.zeros(1)}, file)
    with pytest.raises(CheckpointError, match=r"holds no embed_tokens\.weight of an encoder"):
        _open("hunyuanvideo15-t2v", described)
    del tensors["final_layer_norm.weight"]
    torch.save(tensors, file)
    with pytest.raises(CheckpointError, match=r"1 of its weights are missing, 0 are unknown, e\.g\. final_layer_norm"):
        _open("hunyuanvideo15-t2v", described)
