"""Cases of the kinds Tokens and masks, Audio and Nodes: what of a row becomes ids, and what of them is trained."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.loading import node_build
from mindspeed_mm.utils.errors import BadSample, DataError
from tests.support.tiny import tiny_qwen2_5_vl_dir
from tests.support.tiny_omni import tiny_omni_processor_dir
from tests.unit.data.data_rows import talk, targets

Build = Callable[..., Any]


@pytest.fixture(scope="module")
def omni_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A processor that takes images, videos and sounds of up to 300 s."""
    return tiny_omni_processor_dir(tmp_path_factory.mktemp("omni"))


@pytest.fixture(scope="module")
def vl_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2.5-VL directory."""
    return tiny_qwen2_5_vl_dir(tmp_path_factory.mktemp("vl"), weights=False)


@pytest.fixture
def media(tmp_path: Path) -> dict[str, Any]:
    """A picture, a clip of pictures and a sound in `tmp_path`."""
    rng = np.random.RandomState(0)
    for number in range(4):
        Image.fromarray(rng.randint(0, 256, (56, 84, 3), dtype=np.uint8)).save(tmp_path / f"{number}.png")
    write_tone(tmp_path / "tone.wav", 16_000)
    return {"image": "0.png", "video": ["0.png", "1.png", "2.png", "3.png"], "audio": "tone.wav"}


def write_tone(path: Path, samples: int, rate: int = 16_000) -> None:
    """A 440 Hz tone as a 16-bit mono WAV file."""
    tone = np.sin(np.arange(samples) * 2 * np.pi * 440 / rate) * 16_000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(tone.astype("<i2").tobytes())


@pytest.fixture
def build(tmp_path: Path) -> Build:
    """`build(model, rows, max_length=…, **basic)` writes rows and opens them."""

    def make(model: Path, rows: list[dict[str, Any]], max_length: int | None = None, **basic: Any) -> Any:
        file = f"rows{len(list(tmp_path.glob('rows*')))}.json"
        (tmp_path / file).write_text(json.dumps(rows), encoding="utf-8")
        names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
        columns = {"images": "images", "videos": "videos", "audios": "audios"}
        param = {
            "dataset_type": "huggingface",
            "basic_parameters": {"dataset_dir": str(tmp_path), "dataset": file, **basic},
            "preprocess_parameters": {"model_name_or_path": str(model)},
            "attr": {**names, "assistant_tag": "assistant", **columns},
        }
        return build_mm_dataset(param, max_length=max_length)

    return make


@pytest.mark.parametrize("kind", ["image", "video", "audio"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_limit_inside_a_medium(build: Build, omni_dir: Path, media: dict[str, Any], kind: str, share: float) -> None:
    """T01: a limit inside the second medium's tokens takes the whole turn with its medium, side fields cut alike."""
    own = media[kind]
    whole_row = talk(f"see <{kind}>", "one", f"and <{kind}>", "two", **{f"{kind}s": [own, own]})
    whole = build(omni_dir, [whole_row])[0]
    first = build(omni_dir, [talk(f"see <{kind}>", "one", **{f"{kind}s": [own]})])[0]
    places = (whole["mm_token_type_ids"] if "mm_token_type_ids" in whole else whole["input_ids"]).clone()
    number = {"image": "<|IMAGE|>", "video": "<|VIDEO|>", "audio": "<|AUDIO|>"}[kind]
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(omni_dir).convert_tokens_to_ids(number)
    run = (whole["input_ids"] == token).nonzero().flatten()
    second = run[len(run) // 2 :]
    limit = int(second[0]) + 1 + int(share * (len(second) - 1))
    dataset = build(omni_dir, [whole_row], max_length=limit)
    cut = dataset[0]
    assert "cut after" in cut.pop("note")
    assert cut.keys() == first.keys() and all(torch.equal(cut[key], first[key]) for key in first)
    assert len(places) == len(whole["labels"]) and dataset.measure(0)[0].tokens == len(first["input_ids"])
    # without a turn before it the row gives no sample: never half a medium
    alone = build(omni_dir, [talk(f"<{kind}>", "two", **{f"{kind}s": [own]})], max_length=len(second) // 2)
    assert alone[0]["fault"] == "longer than the length limit" and int(alone[0]["num_rows"]) == 0


def test_targets_are_the_answer_and_its_end(build: Build, vl_dir: Path) -> None:
    """T03: a prompt of k ids and an answer of m: exactly m + 1 targets, the first predicted from the last prompt id."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vl_dir)
    sample = build(vl_dir, [talk("which digit is in the image", "a seven")])[0]
    answer = tokenizer("a seven<|im_end|>", add_special_tokens=False).input_ids
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    first = labels.index(answer[0])
    assert [label for label in labels if label != -100] == answer == labels[first : first + len(answer)]
    prompt = "<|im_start|>assistant\n"
    assert tokenizer.decode(ids[:first]).endswith(prompt)


def test_flags_of_turns(build: Build, vl_dir: Path) -> None:
    """T04: three turns, one with loss_mask 0: only the other answers and their end marks; never a header or prompt."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vl_dir)
    row = talk("one", "red", "two", "green", "three", "blue", system="be brief")
    row["messages"][4]["loss_mask"] = 0
    assert targets(build(vl_dir, [row])[0], tokenizer) == "red<|im_end|>|blue<|im_end|>"
    row["messages"][4]["loss_mask"] = 1
    row["messages"][2]["loss"] = False
    assert targets(build(vl_dir, [row])[0], tokenizer) == "green<|im_end|>|blue<|im_end|>"


def test_a_row_of_exactly_the_limit_is_kept(build: Build, vl_dir: Path) -> None:
    """T06: a row as long as the limit is kept whole; with one token less it is left out."""
    row = talk("which digit", "a seven")
    length = len(build(vl_dir, [row])[0]["input_ids"])
    kept, dropped = (build(vl_dir, [row], max_length=limit)[0] for limit in (length, length - 1))
    assert len(kept["input_ids"]) == length and "note" not in kept
    assert dropped["fault"] == "longer than the length limit"


def test_typed_markers_never_move_a_target(build: Build, vl_dir: Path) -> None:
    """T03: a header or an end mark that a person typed into an answer belongs to the answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(vl_dir)
    answer = "red <|im_end|>\n<|im_start|>assistant\nblue"
    sample = build(vl_dir, [talk("what <|im_start|>assistant\nno", answer, "and", "green")])[0]
    assert targets(sample, tokenizer) == answer + "<|im_end|>|green<|im_end|>"


@pytest.mark.parametrize("seconds, window", [(31, 300), (31, 30)], ids=["omni", "window"])
def test_long_sound(
    build: Build, tmp_path: Path, omni_dir: Path, seconds: int, window: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A01: 31 s are taken whole by a model that can; a 30 s window is cut with a warning; tokens equal features."""
    model = omni_dir if window == 300 else tiny_omni_processor_dir(tmp_path / "window", seconds=window)
    write_tone(tmp_path / "long.wav", seconds * 16_000)
    dataset = build(model, [talk("<audio>", "a tone", audios=["long.wav"])])
    sample = dataset[0]
    features = int(sample["feature_attention_mask"].sum())
    assert features == min(seconds, window) * 100
    from transformers import AutoTokenizer

    token = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|AUDIO|>")
    places = sample["input_ids"] == token
    assert int(places.sum()) == ((features - 1) // 2 + 1 - 2) // 2 + 1  # what the tower makes of these features
    assert dataset.measure(0)[0].tokens == len(sample["input_ids"])
    assert (sample["labels"][places] == -100).all()


def test_short_empty_and_silent_sounds(build: Build, tmp_path: Path, omni_dir: Path) -> None:
    """A03: 368 samples are padded to a window, a file without samples is counted, silence is a sound."""
    write_tone(tmp_path / "short.wav", 368)
    write_tone(tmp_path / "empty.wav", 0)
    with wave.open(str(tmp_path / "silent.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(16_000)
        file.writeframes(bytes(2 * 8_000))
    names = ["short.wav", "empty.wav", "silent.wav"]
    rows = [talk("<audio>", "a sound", audios=[name]) for name in names]
    dataset = build(omni_dir, rows, on_bad_sample="skip")
    short, empty, silent = (dataset[index] for index in range(3))
    assert int(short.get("num_rows", 1)) == 1 and int(short["feature_attention_mask"].sum()) > 0
    assert empty["fault"] == "sound is empty" and "empty.wav" in empty["note"]
    assert "fault" not in silent and int(silent["feature_attention_mask"].sum()) == 50
    with pytest.raises(BadSample, match=r"row 2: .*empty\.wav"):
        build(omni_dir, rows)[1]


def cached(folder: Path, model: Path, cache_dir: Path, **basic: Any) -> dict[str, Any]:
    """data.json's dataset_param with a token cache."""
    names = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
    cache = {"cache_dir": str(cache_dir), "preprocess_on_fly": False}
    return {
        "dataset_type": "huggingface",
        "basic_parameters": {"dataset_dir": str(folder), "dataset": "rows.json", **cache, **basic},
        "preprocess_parameters": {"model_name_or_path": str(model)},
        "attr": {**names, "assistant_tag": "assistant", "images": "images"},
    }


def open_on_node(local_rank: int, param: dict[str, Any], answers: Any) -> None:
    """One process of a node: open the cached data set, say which file it uses, when that was made, and a sample."""
    os.environ["LOCAL_RANK"] = os.environ["RANK"] = str(local_rank)
    node_build.PATIENCE = 3.0
    try:
        dataset = build_mm_dataset(param)
        path = dataset.cache.path
        answers.put((local_rank, path, os.stat(path).st_mtime_ns, dataset[0]["input_ids"].tolist()))
    except DataError as error:
        answers.put((local_rank, None, 0, str(error)))


def on_nodes(processes: list[tuple[int, dict[str, Any]]]) -> list[tuple[int, Any, int, Any]]:
    """Run `open_on_node` in processes of their own at the same time."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    started = [context.Process(target=open_on_node, args=(rank, param, answers)) for rank, param in processes]
    for process in started:
        process.start()
    found = [answers.get(timeout=60) for _ in started]
    for process in started:
        process.join(30)
        assert process.exitcode == 0
    return sorted(found, key=lambda answer: (str(answer[1]), answer[0]))


def test_each_node_makes_one_cache(tmp_path: Path, vl_dir: Path) -> None:
    """N01: two nodes with folders of their own and two processes each: one cache a node, used by both processes; nodes
    that share a folder share the cache; a process that sees another folder is told so."""
    rows = [talk("which digit", f"a {word}") for word in ("seven", "four", "two")]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    one, two = (cached(tmp_path, vl_dir, tmp_path / name) for name in ("node0", "node1"))
    answers = on_nodes([(0, one), (1, one), (0, two), (1, two)])
    for node, pair in (("node0", answers[:2]), ("node1", answers[2:])):
        files = list((tmp_path / node).glob("*.arrow"))
        assert len(files) == 1 and not list((tmp_path / node).glob("*.tmp"))
        assert {(path, made) for _, path, made, _ in pair} == {(str(files[0]), files[0].stat().st_mtime_ns)}
    assert len({tuple(ids) for *_, ids in answers}) == 1
    # a second launch, and two nodes with one folder: nothing is made again
    before = answers[0][2]
    assert {made for _, _, made, _ in on_nodes([(0, one), (0, one), (1, one)])} == {before}
    ((_, path, _, message),) = on_nodes([(1, cached(tmp_path, vl_dir, tmp_path / "elsewhere"))])
    assert path is None and "sees no token cache" in message and "elsewhere" in message


def test_the_cache_changes_nothing(tmp_path: Path, build: Build, vl_dir: Path, media: dict[str, Any]) -> None:
    """N01: samples and sizes out of the cache are those made on the fly; other rows or limits make another cache;
    overwrite_cache makes it anew; a damaged one is refused with what to do."""
    rows = [
        talk("see <image>", "one", "and <image>", "two", images=["0.png", "1.png"]),
        talk("no picture", "ok", images=[]),
        talk("<image>", "gone", images=["missing.png"]),
        talk("a question that is too long " * 40, "no", images=[]),
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    param = cached(tmp_path, vl_dir, tmp_path / "cache", on_bad_sample="skip", preprocessing_num_workers=2)
    from_cache = build_mm_dataset(param, max_length=120)
    fresh = build(vl_dir, rows, max_length=120, on_bad_sample="skip")
    assert len(from_cache) == len(fresh)
    for index in range(len(fresh)):
        made, expected = from_cache[index], fresh[index]
        assert made.keys() == expected.keys(), index
        assert all(torch.equal(made[key], expected[key]) for key in expected if isinstance(expected[key], torch.Tensor))
        assert from_cache.measure(index) == fresh.measure(index)
    short = len(from_cache[0]["input_ids"]) - 1
    assert torch.equal(from_cache.get(0, room=short)["input_ids"], fresh.get(0, room=short)["input_ids"])
    assert build_mm_dataset(param, max_length=121).cache.path != from_cache.cache.path
    path = Path(from_cache.cache.path)
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(DataError, match="overwrite_cache"):
        build_mm_dataset(param, max_length=120)[0]
    os.utime(path, (time.time() - 10**6,) * 2)
    param["basic_parameters"]["overwrite_cache"] = True
    assert build_mm_dataset(param, max_length=120).measure(0) == fresh.measure(0)
