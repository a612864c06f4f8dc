"""What `mindspeed-mm init` says of directories and rows that can't be trained on; it leaves nothing behind."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mindspeed_mm.tools.cli import main
from tests.support.first_rows import CAPTIONS, PICTURE_ROWS, ROWS

Change = Callable[[Path], object]


@pytest.fixture
def model(qwen3_dir: Path, tmp_path: Path) -> Path:
    """A copy of a small Qwen3 beside rows of messages, in the current folder."""
    return Path(shutil.copytree(qwen3_dir, tmp_path / "model"))


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def refusal(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """What init says, which writes nothing."""
    assert main(["init", "--output", "run", *words]) == 1
    assert not Path("run").exists()
    return capsys.readouterr().err


def _only(folder: Path, *names: str) -> None:
    for entry in folder.iterdir():
        if entry.name not in names:
            entry.unlink()


def _adapter(folder: Path) -> None:
    _only(folder)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-8B"}')


def _gguf(folder: Path) -> None:
    _only(folder)
    (folder / "model-Q4_K_M.gguf").touch()


def _run_folder(folder: Path) -> None:
    _only(folder)
    (folder / "latest_checkpointed_iteration.txt").write_text("20")
    (folder / "hf").mkdir()


def _cache(folder: Path) -> None:
    inner = folder / "snapshots" / "abc"
    inner.mkdir(parents=True)
    (folder / "config.json").rename(inner / "config.json")


def _without_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "consolidated.00.pth").touch()


def _incomplete(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    files = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def _pointer(folder: Path) -> None:
    (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")


def _cut_off(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100])


def _without_tokenizer(folder: Path) -> None:
    for file in folder.glob("*token*"):
        file.unlink()


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _config(**changes: object) -> Change:
    def change(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _encoder_only(folder: Path) -> None:
    _config(model_type="bert", architectures=["BertModel"])(folder)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (shutil.rmtree, "--model model does not exist"),
        (_only, "is no model's directory: it has neither config.json (transformers) nor model_index.json (diffusers)"),
        (
            _adapter,
            "holds LoRA adapters, which are trained on top of their base model: give --model the directory of Qw",
        ),
        (
            _gguf,
            "holds GGUF files, quantised weights for inference, which can't be trained; expected the model's direc",
        ),
        (_run_folder, "is the folder of a run, not of a model; its exported model is 'model/hf'"),
        (_cache, "has no config.json; did you mean 'model/snapshots/abc'?"),
        (_without_weights, "what it has can't be read here: consolidated.00.pth; fetch them, or write --from-scratch"),
        (_incomplete, "names 2 files of weights, and model-00002-of-00002.safetensors is missing; fetch them again"),
        (_pointer, "'model/model.safetensors' is a pointer of Git LFS, not the weights: git lfs pull"),
        (_cut_off, "'model/model.safetensors' can't be read"),
        (_without_tokenizer, "--model model holds no tokenizer; looked for tokenizer.json"),
        (
            _without_template,
            "has no chat template (base models have none), and rows of conversations need one: name one",
        ),
        (lambda folder: (folder / "config.json").write_text("{"), "model/config.json can't be read: no valid JSON"),
        (_config(model_type="qwen33"), "model/config.json: 'model_type' is 'qwen33', which transformers"),
        (_config(model_type="qwen33"), "did you mean 'qwen3'"),
        (_config(vocab_size=100), "the tokenizer's ids go up to"),
        (_config(_class_name="FluxTransformer2DModel"), "is one part of a diffusers pipeline (FluxTransformer2DModel)"),
        (_encoder_only, "BertModel writes no text: it doesn't generate"),
    ],
)
def test_directories(change: Change, said: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ROWS["messages"](Path())
    change(model)
    assert said in refusal(capsys, "--model", "model", "--data", str(rows))


def test_a_file_is_no_directory(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (model / "model.gguf").touch()
    for name, said in (
        ("model/config.json", "is a file; expected a model's directory in the hub's layout; did you mean 'model'?"),
        ("model/model.gguf", "is a GGUF file, quantised weights for inference"),
        ("Qwen/Qwen3-8B", "`hf download Qwen/Qwen3-8B --local-dir ckpt/Qwen3-8B`"),
    ):
        assert said in refusal(capsys, "--model", name, "--data", str(ROWS["messages"](Path())))


def _rows(*rows: object) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "rows.json"
        path.write_text(json.dumps(list(rows)))
        return path

    return write


def _raw(text: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        path = folder / "rows.json"
        path.write_text(text)
        return path

    return write


def _one_bad_row(folder: Path) -> Path:
    rows = _rows({"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]})(folder)
    rows.write_text(rows.read_text()[1:-1] + "\n3\n")
    return rows


def _folder_of_folders(folder: Path) -> Path:
    (folder / "data" / "train").mkdir(parents=True)
    return folder / "data"


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_raw(""), "the file is empty; expected rows"),
        (_raw("[]"), "no rows in ./rows.json"),
        (_raw('[{"messages": ['), "the file ends inside row 1"),
        (lambda folder: folder / "row.json", "data file not found: ./row.json"),
        (_folder_of_folders, "a folder without data files (.json, .jsonl, .csv, .tsv, .parquet, .arrow); found train/"),
        (_rows({"question": "1", "answer": "2"}), "columns found: answer, question; known forms: "),
        (_rows({"question": "1", "answer": "2"}), "here: --attr formatting=alpaca prompt=question response=answer"),
        (
            _rows({"prompt": "1", "chosen": "2", "rejected": "3"}),
            "--attr formatting=alpaca prompt=prompt response=chose",
        ),
        (
            _rows({"talk": [{"speaker": "A", "text": "1"}, {"speaker": "B", "text": "2"}], "image": "a.png"}),
            "--attr formatting=sharegpt messages=talk role_tag=speaker content_tag=text user_tag=A assistant_tag=B "
            "images=image",
        ),
        (_rows({"a": 1}), "columns found: a; known forms: "),
        (
            _raw('{"images": [{"id": 1, "file_name": "a.png"}], "annotations": []}'),
            "COCO's annotations, not rows; mindspeed-mm data convert",
        ),
        (CAPTIONS["metadata"], "rows of captions, which models that make images or videos are trained on"),
        (CAPTIONS["annotations"], "rows of captions, which models that make images or videos are trained on"),
        (
            PICTURE_ROWS["llava"],
            "30 of 30 rows that were looked at can't be used: 30 × a model that doesn't read images",
        ),
        (_one_bad_row, "1 of 2 rows that were looked at can't be used: 1 × a row can't be read: ./rows.json, line 2"),
        (_one_bad_row, "To leave such rows out: --on-bad-sample skip"),
    ],
)
def test_rows(write: Callable[[Path], Path], said: str, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in refusal(capsys, "--model", "model", "--data", str(write(Path())))


def test_missing_pictures(qwen2_5_vl_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = PICTURE_ROWS["llava"](Path())
    for number in range(2):
        Path("images", f"{number:03}.png").unlink()
    words = ("--model", str(qwen2_5_vl_dir), "--data", str(rows))
    said = refusal(capsys, *words)
    assert re.search(r"2 of 30 rows .* can't be used: 2 × image not found: \S*rows\.json, row 1: image not found", said)
    assert main(["init", "--output", "run", *words, "--on-bad-sample", "skip"]) == 0
    assert "30 rows; 2 left out" in capsys.readouterr().out
    assert "on_bad_sample: skip" in Path("run", "run.yaml").read_text()


def test_nothing_is_overwritten(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("run").mkdir()
    Path("run", "mine.txt").touch()
    assert main(["init", "--output", "run", "--model", "model", "--data", str(ROWS["messages"](Path()))]) == 1
    assert "--output 'run' is not empty (mine.txt), and nothing is overwritten" in capsys.readouterr().err
    assert [entry.name for entry in Path("run").iterdir()] == ["mine.txt"]


def test_flags_that_do_not_fit(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "model", "--data", str(ROWS["messages"](Path())))
    assert "--attr prompt: expected KEY=COLUMN" in refusal(capsys, *words, "--attr", "prompt")
    assert "did you mean 'prompt'" in refusal(capsys, *words, "--attr", "promt=question")
    assert "found 'qwn3'; did you mean 'qwen3'" in refusal(capsys, *words, "--template", "qwn3")
    assert "--devices is 8 and --memory None; expected both" in refusal(capsys, *words, "--devices", "8")
    _config(model_type="llama", architectures=["LlamaForCausalLM"])(model)
    assert "'llama'" in refusal(capsys, *words, "--backend", "megatron")
