"""Every adapted family: its rows are its processor's, its steps those of plain transformers, its weights the hub's.

A family is a module of `tests/support/families`; the real entry script runs on two ranks, fp32.
"""

from __future__ import annotations

import atexit
import functools
import itertools
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from mindspeed_mm.configs.data_config import DatasetParam
from mindspeed_mm.data import build_mm_dataset
from mindspeed_mm.data.loading.model_match import read_model_config
from mindspeed_mm.utils.errors import BadSample
from tests.support.families import families
from tests.support.family_case import FamilyCase
from tests.support.reference import train_reference
from tests.support.roundtrip import load_and_export
from tests.support.workers import RankPool

FAMILIES = families()
STEPS = 2


@functools.cache
def case_of(name: str) -> FamilyCase:
    """A family's case, made once."""
    folder = tempfile.mkdtemp(prefix=f"{name}-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return FamilyCase(name, Path(folder), FAMILIES[name])


@pytest.mark.parametrize("name", FAMILIES)
def test_samples_are_the_processors(name: str) -> None:
    """Ids and media tensors of every row equal those of the whole processor, which is found to be the model's; every
    size was foreseen.

    Where the template writes nothing at the end of an answer, a token is put there, and nothing else is changed.
    """
    from transformers import AutoProcessor, AutoTokenizer

    case = case_of(name)
    case.dataset.check_model(read_model_config(str(case.hf_dir)), "config.json")
    loader = AutoProcessor if case.family.kinds else AutoTokenizer
    processor = loader.from_pretrained(case.hf_dir)
    tokenizer, adapter = getattr(processor, "tokenizer", processor), case.dataset.adapter
    template = getattr(case.dataset.encoder, "template", None)
    takes_text = template is None or template.takes_text
    for number, (row, sample) in enumerate(zip(json.loads(case.data.read_text()), case.samples, strict=True)):
        (size,) = case.dataset.measure(number)
        assert size.tokens == len(sample["input_ids"])
        conversation, media = case.dataset.source.read(number), {}
        reader, folders = case.dataset.lazy_encoder.reader(), case.dataset.source.folders(number)
        for ref in conversation.media:
            media.setdefault(ref.kind, []).append(reader.open(ref, folders, number))
        messages = [
            {
                "role": message.role,
                "content": [
                    {"type": "text", "text": part} if isinstance(part, str) else {"type": part.kind}
                    for part in message.parts
                ]
                if message.media or not takes_text
                else "".join(part for part in message.parts if isinstance(part, str)),
            }
            for message in conversation.messages
        ]
        if not case.family.kinds:
            text = tokenizer.apply_chat_template(messages, tokenize=False)
            assert as_written(case, sample) == tokenizer(text, add_special_tokens=False).input_ids
            continue
        whole = (case.family.whole or whole_of(adapter))(processor, messages, media)
        assert as_written(case, sample) == whole["input_ids"][0].tolist(), row
        for key in {name for names in adapter.media_keys.values() for name in names}:
            assert (key in sample) == (key in whole), key
            if key in sample:
                assert torch.equal(sample[key], torch.as_tensor(whole[key])), key


def as_written(case: FamilyCase, sample: Mapping[str, Any]) -> list[int]:
    """A sample's ids without the tokens that were put at the end of answers."""
    ids, labels = sample["input_ids"].tolist(), sample["labels"].tolist()
    where, end = ends_of_answers()[case.name].put, last_targets(sample)[-1]
    assert labels[-1] == ids[-1] == end or where != "last"
    if where == "every":
        return [token for token, label in zip(ids, labels, strict=True) if label != end]
    return ids[:-1] if where == "last" else ids


def last_targets(sample: Mapping[str, Any]) -> list[int]:
    """The last target of each answer."""
    labels = [*sample["labels"].tolist(), -100]
    return [label for label, following in itertools.pairwise(labels) if label != -100 and following == -100]


class AnswerEnd(NamedTuple):
    """A row of the table in docs/data.md: the token, and after which answers it is put ("", "last", "every")."""

    token: str
    put: str


@functools.cache
def ends_of_answers() -> dict[str, AnswerEnd]:
    """Model type → what ends an answer, as docs/data.md says it."""
    places = {"after each answer": "", "at the head of the next message; put after the last answer": "last"}
    places |= {"after all answers but the last, where it is put": "last", "nowhere; put after each answer": "every"}
    text = (Path(__file__).parents[2] / "docs/data.md").read_text(encoding="utf-8")
    table = text.partition("| model_type | ends an answer | written by the template |\n|---|---|---|\n")[2]
    found = {}
    for line in table.partition("\n\n")[0].splitlines():
        names, token, place = (cell.strip() for cell in line.strip("|").split(" | "))
        for name in names.split(", "):
            found[name.strip("`")] = AnswerEnd(token.strip("`").replace("\\|", "|"), places[place.partition(" (")[0]])
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_every_answer_ends_with_a_stop_token(name: str) -> None:
    """W01: the table of docs/data.md holds for every family: its token is the last target of each answer."""
    case = case_of(name)
    tokenizer = getattr(case.dataset.lazy_encoder.processor(), "tokenizer", case.dataset.lazy_encoder.processor())
    rows, end = json.loads(case.data.read_text()), tokenizer.convert_tokens_to_ids(ends_of_answers()[name].token)
    for row, sample in zip(rows, case.samples, strict=True):
        answers = sum(turn["role"] == "assistant" for turn in row["messages"])
        assert last_targets(sample) == [end] * answers, row


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.kinds and family.whole is None])
def test_media_in_answers_are_no_targets(name: str, tmp_path: Path) -> None:
    """D12: pictures, clips and sounds in an answer leave its words and its end alone as targets, whatever marks are
    written for them; a template that can't place them there is refused."""
    case = case_of(name)
    media = [(kind, f"0_{0}.png" if kind == "image" else "0.wav") for kind in case.family.kinds if kind != "video"]
    frames = [f"0_{frame}.png" for frame in range(case.family.clip_frames[-1])]
    media += [("video", frames)] if "video" in case.family.kinds else []
    words = [{"type": "text", "text": text} for text in ("red ", "green ", "blue")]
    parts = [{"type": kind, kind: value} for kind, value in media]
    mixed = [*itertools.chain(*itertools.zip_longest(words, parts, fillvalue=None))]
    question = {"role": "user", "content": [{"type": "text", "text": "what"}]}
    rows = [
        {"messages": [question, {"role": "assistant", "content": [part for part in content if part is not None]}]}
        for content in (mixed, words)
    ]
    (tmp_path / "data.json").write_text(json.dumps(rows), encoding="utf-8")
    param = json.loads(case.files["data.json"].read_text())["dataset_param"]
    param["basic_parameters"] |= {"dataset": str(tmp_path / "data.json"), "dataset_dir": str(case.data.parent)}
    dataset = build_mm_dataset(DatasetParam.from_dict(param), adapter=case.dataset.adapter)
    tokenizer, plain = dataset.lazy_encoder.processor().tokenizer, dataset[1]
    try:
        sample = dataset[0]
    except BadSample as error:
        assert "places 0" in str(error) and name in ("glm4v", "llava_next", "mistral3")
        return
    assert name not in ("glm4v", "llava_next", "mistral3")
    shown = [tokenizer.decode([t for t in made["labels"].tolist() if t != -100]).split() for made in (sample, plain)]
    assert "".join(shown[0]) == "".join(shown[1]) and "redgreenblue" in "".join(shown[0])


def whole_of(adapter: Any) -> Callable[[Any, list[Any], Mapping[str, list[Any]]], Mapping[str, Any]]:
    """What the processor makes of a row, by its chat template."""

    def whole(processor: Any, messages: list[Any], media: Mapping[str, list[Any]]) -> Mapping[str, Any]:
        arguments: dict[str, Any] = {"images": media.get("image"), "audio": media.get("audio")}
        if "video" in media:
            from transformers.video_utils import VideoMetadata

            told = [VideoMetadata(**adapter.video_metadata(clip)) for clip in media["video"]]
            arguments["videos"] = [clip.frames for clip in media["video"]]
            arguments["videos_kwargs"] = {"do_sample_frames": False, "video_metadata": told}
        text = processor.apply_chat_template(messages, tokenize=False)
        bos = processor.tokenizer.bos_token
        if bos is not None and text.startswith(bos):  # as apply_chat_template does where it makes the ids itself
            arguments["add_special_tokens"] = False
        return processor(text=[text], return_tensors="pt", **{k: v for k, v in arguments.items() if v is not None})

    return whole


# whose model has the parts and passes of another one's; only their rows differ
ALIKE = ("glm46v",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if name in ALIKE else []) for name in FAMILIES]
)
def test_steps_equal_transformers(name: str, ranks2: RankPool, tmp_path: Path) -> None:
    """Two steps on two ranks, rows of all media and of none: losses 1e-6, norms 1e-5 of a plain loop."""
    case = case_of(name)
    losses, norms, _ = train_reference(case.hf_dir, case.inputs(), STEPS, outputs=case.family.outputs)
    found = case.run(ranks2, tmp_path / "run", STEPS)
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)


# each with positions, masks or towers of its own; the others' packs by name (pytest -m full)
PACKED_ALWAYS = ("gemma3", "glm4v", "gpt_oss", "internvl", "mistral3", "qwen2_5_omni", "qwen3_omni_moe", "qwen3_vl")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in PACKED_ALWAYS else [pytest.mark.full])
        for name, family in FAMILIES.items()
        if family.packs
    ],
)
def test_packed_steps_equal_transformers(name: str, ranks1: RankPool, tmp_path: Path) -> None:
    """All rows in a few packs: the same losses and norms."""
    case = case_of(name)
    longest = max(len(sample["input_ids"]) for sample in case.samples)
    data = json.loads(case.files["data.json"].read_text())
    data["dataset_param"]["basic_parameters"]["packing"] = True
    packed = tmp_path / "data.json"
    packed.write_text(json.dumps(data))
    flags = {"mm_data": packed, "global_batch_size": 2, "seq_length": 2 * longest, "log_row_ids": True}
    found = case.run(ranks1, tmp_path / "run", STEPS, **flags)
    lines = (tmp_path / "run/rows/rank0.jsonl").read_text().splitlines()
    rows = [json.loads(line)["rows"] for line in lines]
    assert max(map(len, rows)) > 2
    losses, norms, _ = train_reference(
        case.hf_dir, case.inputs(), STEPS, rows_of=lambda step: rows[step], outputs=case.family.outputs
    )
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)


def test_recomputed_layers_pass_on_their_keys(ranks1: RankPool, tmp_path: Path) -> None:
    """Gemma 4, reentrant recompute: keys and values that later layers take keep their gradients."""
    case = case_of("gemma4")
    keys = {"recompute_modules": ["model.language_model.layers.{*}"], "use_reentrant": True}
    (tmp_path / "fsdp2.yaml").write_text(yaml.safe_dump(keys))
    losses, norms, _ = train_reference(case.hf_dir, case.inputs(), STEPS)
    found = case.run(ranks1, tmp_path / "run", STEPS, fsdp2_config_path=tmp_path / "fsdp2.yaml")
    assert found[0] == pytest.approx(losses, rel=1e-6)
    assert found[1] == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_come_out_as_they_went_in(name: str, ranks2: RankPool, tmp_path: Path) -> None:
    """Loaded into two ranks' shards and exported: the files hold the source's names, dtypes and bits."""
    case = case_of(name)
    model = {**case.family.model, "init_from_hf_path": str(case.hf_dir)}
    ranks2.run(load_and_export, model, list(case.family.wrap), tmp_path / "hf", timeout=120)
    exported, source = load_all(tmp_path / "hf"), load_all(case.hf_dir)
    assert exported.keys() == source.keys()
    for key, tensor in source.items():
        assert exported[key].dtype == tensor.dtype and torch.equal(exported[key], tensor), key


def load_all(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a directory's safetensors files."""
    return {key: value for file in sorted(folder.glob("*.safetensors")) for key, value in load_file(file).items()}


@pytest.mark.parametrize("name, size", [(n, size) for n, family in FAMILIES.items() for size in family.published])
def test_published_sizes(name: str, size: str) -> None:
    """The model of a published size, built on meta: its parameters within 0.1 % of the published number."""
    from mindspeed_mm.models.common.modelzoo import ModelHub

    make, expected = FAMILIES[name].published[size]
    config = make()
    with torch.device("meta"):
        model = ModelHub.get(FAMILIES[name].model.get("model_id"), config)._from_config(config)  # type: ignore[attr-defined]
    model.tie_weights()
    assert sum(p.numel() for p in {id(p): p for p in model.parameters()}.values()) == pytest.approx(expected, rel=1e-3)
