"""Cases of what a row's text becomes: its characters, its ids, what ends an answer, media that stand in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.generation.annotations import read_annotation
from mindspeed_mm.data.loading.model_match import check_model_match
from mindspeed_mm.data.loading.providers import data_json_provider
from mindspeed_mm.data.start import DataStart
from mindspeed_mm.models.transformers.gemma3.data import ADAPTER
from mindspeed_mm.tools.cli import main
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.text import whole_characters
from tests.support.families import glm4v, gpt_oss
from tests.support.runs import run_of
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
from tests.support.tiny_vision import byte_tokenizer
from tests.unit.data.data_rows import talk, targets, turn

Config = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL directory without weights."""
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("vl"), weights=False)


@pytest.fixture(scope="module")
def text_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 directory without weights: a tokenizer and no processor."""
    return tiny_qwen3_dir(tmp_path_factory.mktemp("text"), weights=False)


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """`config(model, rows, attr=…, **basic)` writes rows.json and returns `dataset_param`."""

    def make(model: Path, rows: list[Any], attr: Any = None, preprocess: Any = None, **basic: Any) -> dict[str, Any]:
        (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
        names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
        columns = {"assistant_tag": "assistant", "images": "images", "videos": "videos", "audios": "audios"}
        return {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset_dir": str(tmp_path), "dataset": "rows.json", **basic},
            "preprocess_parameters": {"model_name_or_path": str(model), **(preprocess or {})},
            "attr": {**names, **columns, **(attr or {})},
        }

    return make


def tokenizer_of(model: Path) -> Any:
    """transformers' own tokenizer of a directory."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def check(folder: Path, param: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Run `mindspeed-mm data check`; exit status and report."""
    (folder / "data.json").write_text(json.dumps({"dataset_param": param}), encoding="utf-8")
    status = main(["data", "check", str(folder / "data.json"), "--num-workers", "0"])
    return status, json.loads((folder / "report.json").read_text(encoding="utf-8"))


HALF = "\ud83d"  # the first half of an emoji's surrogate pair; json writes it as \ud83d


@pytest.mark.parametrize("half", [HALF, "\ude00"], ids=["first half", "second half"])
def test_half_a_surrogate_pair_becomes_a_replacement_character(
    config: Config, text_dir: Path, tmp_path: Path, half: str
) -> None:
    """W07: in a question, an answer, a system text, a tool's schema, a call and a plain text; `data check` reads it."""
    call = {"type": "function", "function": {"name": "look", "arguments": {f"k{half}": half}}}
    rows = [
        talk(f"which{half} digit", "seven"),
        talk("which digit", f"{half}seven{half}"),
        talk("which digit", "seven", system=f"be {half} brief"),
        {
            "messages": [turn("user", "q"), turn("assistant", "", tool_calls=[call])],
            "tools": [{"name": "look", f"k{half}": half}],
        },
        talk("which digit", "seven"),
    ]
    param = config(text_dir, rows, attr={"tools": "tools"}, template="qwen3_nothink", on_bad_sample="skip")
    dataset, tokenizer = build_mm_dataset(param), tokenizer_of(text_dir)
    samples = [dataset[index] for index in range(len(rows))]
    assert not any("fault" in sample for sample in samples)
    assert [tokenizer.decode(sample["input_ids"]).count("\ufffd") for sample in samples] == [1, 2, 1, 4, 0]
    assert targets(samples[1], tokenizer) == "\ufffdseven\ufffd<|im_end|>"
    status, report = check(tmp_path, param)
    assert status == 0 and report["samples"] == len(rows) and not report["left_out"]
    plain = config(text_dir, [{"text": f"seven {half}"}], attr={"prompt": "text"}, stage="pretrain")
    assert tokenizer.decode(build_mm_dataset(plain)[0]["input_ids"]).startswith("seven \ufffd")


def test_halves_that_belong_together_are_put_together() -> None:
    """W07: a pair given as two halves is the character that it means; text without halves stays the same object."""
    whole = "seven 😀"
    assert whole_characters("seven \ud83d" + "\ude00") == whole and whole_characters(whole) is whole
    assert whole_characters("\ude00\ud83da\ud83d\ud83d\ude00") == "\ufffd\ufffda\ufffd😀"


def test_half_a_surrogate_pair_in_a_name_is_a_row_that_is_left_out(
    config: Config, vl_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """W07: a picture of such a name isn't there: its row alone is left out, and the message can be printed and kept."""
    rows = [talk("<image>", "seven", images=[f"{HALF}.png"]), talk("which digit", "seven")]
    param = config(vl_dir, rows, on_bad_sample="skip")
    assert len(build_mm_dataset(param)) == 1
    status, report = check(tmp_path, param)
    assert status == 0 and sum(entry["rows"] for entry in report["left_out"].values()) == 1
    assert "\\ud83d.png" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"row 1: .*\\ud83d\.png") as raised:
        build_mm_dataset(config(vl_dir, rows))
    str(raised.value).encode("utf-8")


def test_half_a_surrogate_pair_in_a_caption() -> None:
    """W07: captions of clips and pictures are texts like others."""
    one = read_annotation({"path": "a.mp4", "cap": f"a{HALF} digit"}, False, "row 1")
    several = read_annotation({"path": "a.mp4", "cap": [f"{HALF}a", "digit"]}, False, "row 1")
    assert one.captions == ("a\ufffd digit",) and several.captions == ("\ufffda", "digit")


def tokenizer_dir(folder: Path, form: str) -> Path:
    """A directory of a text model whose tokenizer adds `form` to every text, "$A"."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(folder, {"bos_token": "<bos>", "eos_token": "<eos>"})
    ids = [(token, tokenizer.convert_tokens_to_ids(token)) for token in ("<bos>", "<eos>")]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=form, special_tokens=ids)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("form", ["$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"])
def test_plain_text_is_what_the_tokenizer_makes_of_it(config: Config, tmp_path: Path, form: str) -> None:
    """W08: ids = tokenizer(text) + the end token once, whatever the tokenizer adds to a text by itself."""
    model = tokenizer_dir(tmp_path / "model", form)
    texts = ["seven", " two  digits\n", "图片 <bos> inside", "it ends<eos>", "<bos>twice", "<|im_start|>user"]
    dataset = build_mm_dataset(
        config(model, [{"text": text} for text in texts], attr={"prompt": "text"}, stage="pretrain")
    )
    tokenizer = tokenizer_of(model)
    for number, text in enumerate(texts):
        expected = tokenizer(text).input_ids
        expected += [tokenizer.eos_token_id] * (expected[-1] != tokenizer.eos_token_id)
        sample = dataset[number]
        assert sample["input_ids"].tolist() == sample["labels"].tolist() == expected, text
        assert dataset.measure(number)[0].tokens == len(expected)


def test_plain_text_through_a_processor_is_the_same(config: Config, tmp_path: Path) -> None:
    """W08: a model with pictures reads plain text as its tokenizer alone does, in pieces too."""
    from transformers import Gemma3ImageProcessor, Gemma3Processor

    from tests.support.families import gemma3

    media = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<image_soft_token>"}
    tokenizer = byte_tokenizer(tmp_path / "model", {**gemma3.TOKENS, **media}, adds_bos=True)
    image = Gemma3ImageProcessor(size={"height": 32, "width": 32})
    Gemma3Processor(image, tokenizer, chat_template=gemma3.TEMPLATE).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "alone")
    rows = [{"text": "<bos>which digit is seven"}]
    for name in ("model", "alone"):
        keys = {"attr": {"prompt": "text"}, "stage": "pretrain", "cutoff_len": 5}
        dataset = build_mm_dataset(config(tmp_path / name, rows, **keys), adapter=ADAPTER if name == "model" else None)
        pieces = [dataset.get(0, piece, room=5)["input_ids"] for piece in range(len(dataset.measure(0)))]
        assert torch.cat(pieces).tolist() == [*tokenizer(rows[0]["text"]).input_ids, tokenizer.eos_token_id]
        assert len(pieces) > 1


def start(param: dict[str, Any], model: Path, fsdp2: bool) -> None:
    """Build the loaders as the entry scripts do, for a model.json that names a directory."""
    data = DataConfig.from_dict({"dataset_param": param}, file="data.json")
    typed = (TransformersModelConfig if fsdp2 else VLMModelConfig).from_dict({"init_from_hf_path": str(model)})
    run = run_of(data=data, model=typed, use_torch_fsdp2=fsdp2, num_workers=0)
    data_json_provider(run, DataStart())


def edit_json(file: Path, **values: Any) -> None:
    """Set top-level keys of a JSON file, which may not be there yet."""
    content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    file.write_text(json.dumps({**content, **values}), encoding="utf-8")


@pytest.mark.parametrize("fsdp2", [True, False], ids=["fsdp2", "megatron"])
def test_a_tokenizer_larger_than_the_embedding_is_refused_at_start(
    config: Config, tmp_path: Path, text_dir: Path, fsdp2: bool
) -> None:
    """W06: five tokens more than the embedding has rows, in the model's directory or in another one: both numbers."""
    tokenizer = tokenizer_of(text_dir)
    rows = json.loads((text_dir / "config.json").read_text())["vocab_size"]
    more = rows - len(tokenizer) + 5
    tokenizer.add_tokens([f"<new{number}>" for number in range(more)])
    tokenizer.save_pretrained(tmp_path / "larger")
    param = config(tmp_path / "larger", [talk("which digit", "seven")])
    message = (
        rf"go up to {rows + 4}, and the embedding of .*config\.json has {rows} rows .*'<new{more - 5}>' \({rows}\)"
    )
    with pytest.raises(ConfigError, match=message):
        start(param, text_dir, fsdp2)
    start(config(text_dir, [talk("which digit", "seven")]), text_dir, fsdp2)


def test_a_placeholder_other_than_the_models_is_refused_at_start(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """W06: config.json's image_token_id isn't the processor's: both numbers, by a run and by `data check`."""
    model = tiny_qwen2_5_vl_dir(tmp_path / "model", weights=False)
    ours = json.loads((model / "config.json").read_text())["image_token_id"]
    param = config(model, [talk("which digit", "seven")])
    assert check(tmp_path, param)[0] == 0
    edit_json(model / "config.json", image_token_id=ours - 3)
    message = rf"images are written with token {ours}, and .*config\.json puts them where it finds {ours - 3} \(image_t"
    with pytest.raises(ConfigError, match=message):
        start(param, model, fsdp2=True)
    assert main(["data", "check", str(tmp_path / "data.json"), "--num-workers", "0"]) == 1
    assert f"finds {ours - 3}" in "".join(capsys.readouterr())


def test_a_token_that_is_never_made_may_be_beyond_the_embedding(tmp_path: Path) -> None:
    """W06: Gemma 3's text models have a tokenizer with one token more, a picture's, which is spelt out when typed."""
    from transformers import Gemma3TextConfig

    names = {"bos_token": "<bos>", "eos_token": "<eos>", "image_token": "<image_soft_token>"}
    tokenizer = byte_tokenizer(tmp_path, names)
    assert max(tokenizer.get_vocab().values()) == tokenizer.image_token_id
    model = Gemma3TextConfig(vocab_size=tokenizer.image_token_id)
    check_model_match(tokenizer, DefaultAdapter(), "tokenizer", model, "config.json")
    with pytest.raises(ConfigError, match=f"go up to {tokenizer.image_token_id - 1}, .* 300 rows"):
        check_model_match(tokenizer, DefaultAdapter(), "tokenizer", Gemma3TextConfig(vocab_size=300), "config.json")


@pytest.fixture
def glm_dir(tmp_path: Path) -> Path:
    """A GLM-4.1V processor; generation stops at the head of a user's turn and of a tool's result."""
    tokenizer = glm4v.processor_dir(tmp_path / "glm")
    edit_json(tmp_path / "glm/generation_config.json", eos_token_id=glm4v.stops_of(tokenizer))
    return tmp_path / "glm"


def test_the_stop_token_is_a_target_after_every_answer(config: Config, glm_dir: Path) -> None:
    """W01: at the head of the next message, and behind the last answer; turns that aren't trained and cut rows too
    are ended like others."""
    row = talk("which digit", "seven", "and", "four", "so", "two")
    tokenizer = tokenizer_of(glm_dir)
    whole = build_mm_dataset(config(glm_dir, [row]))[0]
    assert targets(whole, tokenizer) == "seven<|user|>|four<|user|>|two<|user|>"
    assert tokenizer.decode(whole["input_ids"][-2:]).endswith("<|user|>")
    cut = build_mm_dataset(config(glm_dir, [row]), max_length=len(whole["input_ids"]) - 1)[0]
    assert targets(cut, tokenizer) == "seven<|user|>|four<|user|>" and "cut after" in cut["note"]
    assert cut["input_ids"].tolist() == whole["input_ids"][: len(cut["input_ids"])].tolist()
    assert len(build_mm_dataset(config(glm_dir, [row]), max_length=len(cut["input_ids"]))[0]["labels"]) == len(
        cut["labels"]
    )
    row["messages"][3]["loss_mask"] = row["messages"][5]["loss_mask"] = 0
    masked = build_mm_dataset(config(glm_dir, [row]))[0]
    assert targets(masked, tokenizer) == "seven<|user|>" and torch.equal(masked["input_ids"], whole["input_ids"])


def test_a_token_cache_of_other_stop_tokens_is_not_used(config: Config, glm_dir: Path, tmp_path: Path) -> None:
    """W01: the cache holds the same targets, and another generation_config.json makes another cache."""
    rows, cache = (
        [talk("which digit", "seven", "and", "four")],
        {"cache_dir": str(tmp_path), "preprocess_on_fly": False},
    )
    cached = build_mm_dataset(config(glm_dir, rows, **cache))
    assert torch.equal(cached[0]["labels"], build_mm_dataset(config(glm_dir, rows))[0]["labels"])
    tokenizer = tokenizer_of(glm_dir)
    edit_json(glm_dir / "generation_config.json", eos_token_id=tokenizer.eos_token_id)
    edit_json(glm_dir / "config.json", eos_token_id=tokenizer.eos_token_id)
    other = build_mm_dataset(config(glm_dir, rows, **cache))
    assert other.cache.path != cached.cache.path
    assert targets(other[0], tokenizer) == f"seven{tokenizer.eos_token}|four{tokenizer.eos_token}"


def test_an_earlier_answer_is_trained_to_stop_where_harmony_writes_another_token(
    config: Config, tmp_path: Path
) -> None:
    """W01: `<|end|>` stands after earlier answers, and generation stops at `<|return|>` alone: that is their target."""
    tokenizer = byte_tokenizer(tmp_path / "model", {"eos_token": "<|return|>", **{t: f"<|{t}|>" for t in HARMONY}})
    tokenizer.chat_template = gpt_oss.TEMPLATE
    tokenizer.save_pretrained(tmp_path / "model")
    sample = build_mm_dataset(config(tmp_path / "model", [talk("which digit", "seven", "and", "four")]))[0]
    answers = targets(sample, tokenizer).split("|<|channel|>")
    assert [answer.rpartition("<|message|>")[2] for answer in answers] == ["seven<|return|>", "four<|return|>"]
    ids = tokenizer.decode(sample["input_ids"])
    assert ids.count("<|return|>") == 1 and "seven<|end|>" in ids


HARMONY = ("start", "channel", "message", "end")


def test_media_in_an_answer(config: Config, vl_dir: Path, tmp_path: Path) -> None:
    """D12: tags are counted over all turns, typed parts stand in turns of any role; no media mark is a target, and
    every picture's features lie where its tokens do."""
    sizes = {"a.png": (28, 28), "b.png": (84, 56), "c.png": (56, 112)}
    for name, size in sizes.items():
        Image.new("RGB", size, "red").save(tmp_path / name)
    image = {"type": "image"}
    rows = [
        talk("draw <image>", "here: <image> and", "more", "<image>", images=list(sizes)),
        {
            "messages": [
                turn("user", [{"type": "text", "text": "draw "}, image]),
                turn("assistant", [{"type": "text", "text": "here: "}, image, {"type": "text", "text": " and"}]),
                turn("user", "more"),
                turn("assistant", [{"type": "image", "image": "c.png"}]),
            ],
            "images": ["a.png", "b.png"],
        },
    ]
    dataset, tokenizer = build_mm_dataset(config(vl_dir, rows)), tokenizer_of(vl_dir)
    tags, parts = dataset[0], dataset[1]
    assert all(torch.equal(tags[key], parts[key]) for key in ("input_ids", "labels", "pixel_values", "image_grid_thw"))
    assert targets(tags, tokenizer) == "here: | and<|im_end|>|<|im_end|>"
    tokens = (tags["image_grid_thw"].prod(1) // 4).tolist()
    assert tokens == [1 * 1, 3 * 2, 2 * 4] and tags["image_grid_thw"][1].tolist() == [1, 4, 6]
    pads = (tags["input_ids"] == tokenizer.convert_tokens_to_ids("<|image_pad|>")).long()
    starts = (torch.diff(pads, prepend=torch.zeros(1, dtype=torch.long)) == 1).nonzero().flatten().tolist()
    runs = [int(pads[at:].cumprod(0).sum()) for at in starts]
    assert runs == tokens
    prompt = build_mm_dataset(config(vl_dir, rows, train_on_prompt=True))[0]
    assert "vision" not in targets(prompt, tokenizer) and "image_pad" not in targets(prompt, tokenizer)
