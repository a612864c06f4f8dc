"""Cases of what a row's text becomes: its characters, its ids, what ends an answer, media that stand in one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.generation.annotations import read_annotation
from mindspeed_mm.tools.cli import main
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.text import whole_characters
from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir
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
    """W07: in a question, an answer, a system text, a tool's schema, a call, a plain text: U+FFFD, in `data check` too."""
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
