"""An export holds what the source holds, name by name and byte by byte, loads with transformers, and is whole or not
there."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint import hf_export, publish
from mindspeed_mm.checkpoint.hf_export import export
from mindspeed_mm.checkpoint.safetensors_writer import SafetensorsWriter
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.weights import load_weights
from mindspeed_mm.configs.config import ConfigReader
from mindspeed_mm.utils.errors import CheckpointError
from tests.support.tiny_families import (
    FAMILIES,
    assert_same,
    empty_model,
    reference_model,
    reference_tensors,
    tiny_family_dir,
    weights_in,
)


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gloo group of this process alone."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def loaded(hf_dir: Path) -> tuple[Any, list[Any] | None]:
    """The model of a directory with its weights, and the conversions that brought them."""
    model = empty_model(hf_dir)
    plan = load_weights(model, open_weights(hf_dir))
    return model, plan.conversions


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "config.json").read_text())


def small_files(monkeypatch: pytest.MonkeyPatch, size: int = 100_000) -> None:
    monkeypatch.setattr(hf_export, "_LARGEST_FILE", size)
    monkeypatch.setattr(hf_export, "_SMALLEST_FILE", size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_an_export_of_what_was_loaded_is_what_was_there(
    tmp_path: Path, group: Any, family: str, dtype: torch.dtype
) -> None:
    """K01, K10: the hub's names, shapes and dtypes, with the conversions remembered or found again."""
    hf_dir = tiny_family_dir(tmp_path / "hf", family, dtype=dtype)
    model, conversions = loaded(hf_dir)
    for name, known in (("remembered", conversions), ("found", None)):
        out = tmp_path / name
        export(model, out, str(hf_dir), group, None, known)
        assert_same(weights_in(out), load_file(hf_dir / "model.safetensors"))
        assert config_of(out) == config_of(hf_dir)
        assert_same(reference_tensors(out), reference_tensors(hf_dir))


def test_an_export_without_a_source_loads(tmp_path: Path, group: Any) -> None:
    for family in ("qwen3_moe", "qwen2_5_vl tied"):
        hf_dir = tiny_family_dir(tmp_path / family, family)
        model, _ = loaded(hf_dir)
        export(model, tmp_path / f"{family} out", None, group, torch.bfloat16)
        found = weights_in(tmp_path / f"{family} out")
        assert {t.dtype for t in found.values()} == {torch.bfloat16}
        expected = {n: t.bfloat16().float() for n, t in reference_tensors(hf_dir).items()}
        assert_same(reference_tensors(tmp_path / f"{family} out"), expected)


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen3_moe", "gpt_oss"])
def test_logits_of_an_export_are_those_of_the_source(tmp_path: Path, group: Any, family: str) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", family)
    model, conversions = loaded(hf_dir)
    export(model, tmp_path / "out", str(hf_dir), group, None, conversions)
    ids = torch.arange(10, 42).view(2, 16)
    with torch.no_grad():
        before, after = (reference_model(d)(input_ids=ids).logits for d in (hf_dir, tmp_path / "out"))
    assert not before.isnan().any()
    assert torch.equal(before, after)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_split_export_has_a_complete_index(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    small_files(monkeypatch)
    hf_dir = tiny_family_dir(tmp_path / "hf", family)
    model, conversions = loaded(hf_dir)
    out = tmp_path / "out"
    export(model, out, str(hf_dir), group, None, conversions)
    expected = load_file(hf_dir / "model.safetensors")
    assert_same(weights_in(out), expected)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())
    files = {p.name for p in out.glob("*.safetensors")}
    assert set(index["weight_map"].values()) == files and len(files) > 3
    for file in files:
        with safe_open(out / file, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            assert set(opened.keys()) == {n for n, f in index["weight_map"].items() if f == file} != set()
    assert_same(reference_tensors(out), reference_tensors(hf_dir))


@pytest.mark.parametrize("family", ["qwen3 tied", "qwen2_5_vl tied", "internvl tied"])
@pytest.mark.parametrize("in_file", [True, False], ids=["in the file", "in the index only"])
def test_a_tied_head_that_the_source_lists_is_not_exported(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch, family: str, in_file: bool
) -> None:
    """K01: the source's index lists lm_head; the export has no such key, and no empty entry for it."""
    hf_dir = tiny_family_dir(tmp_path / "hf", family, max_shard_size=100_000)
    index = json.loads((hf_dir / "model.safetensors.index.json").read_text())
    embedding = next(n for n in index["weight_map"] if n.endswith("embed_tokens.weight"))
    head = "language_model.lm_head.weight" if family.startswith("internvl") else "lm_head.weight"
    place = index["weight_map"][embedding]
    index["weight_map"][head] = place
    (hf_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    expected = weights_in(hf_dir)
    if in_file:
        content = load_file(hf_dir / place)
        save_file({**content, head: content[embedding].clone()}, hf_dir / place, {"format": "pt"})
    small_files(monkeypatch)
    model, conversions = loaded(hf_dir)
    out = tmp_path / "out"
    export(model, out, str(hf_dir), group, None, conversions)
    assert_same(weights_in(out), expected)
    assert head not in json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    assert_same(reference_tensors(out), reference_tensors(hf_dir))


def test_each_weight_keeps_the_dtype_it_had(tmp_path: Path, group: Any) -> None:
    """Files of mixed dtypes: norms in float32, the rest in bfloat16."""
    for family in ("qwen3", "qwen3_moe"):
        hf_dir = tiny_family_dir(tmp_path / family, family, dtype=torch.bfloat16)
        mixed = {n: t.float() if "norm" in n else t for n, t in load_file(hf_dir / "model.safetensors").items()}
        save_file(mixed, hf_dir / "model.safetensors", {"format": "pt"})
        model, conversions = loaded(hf_dir)
        for dtype in (None, torch.float16):
            export(model, tmp_path / "out", str(hf_dir), group, dtype, conversions)
            assert_same(weights_in(tmp_path / "out"), mixed)


def test_config_names_the_dtype_of_the_source_or_of_what_was_written(tmp_path: Path, group: Any) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen2_5_vl", dtype=torch.bfloat16)
    model, conversions = loaded(hf_dir)
    config = config_of(hf_dir)
    export(model, tmp_path / "out", None, group, None, conversions)
    assert config_of(tmp_path / "out")["dtype"] == "float32"
    del config["dtype"]
    (hf_dir / "config.json").write_text(json.dumps(config))
    export(model, tmp_path / "out", str(hf_dir), group, None, conversions)
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    config["text_config"]["dtype"] = "float16"
    (hf_dir / "config.json").write_text(json.dumps({**config, "torch_dtype": "bfloat16"}))
    export(model, tmp_path / "out", str(hf_dir), group, torch.bfloat16, conversions)
    exported = config_of(tmp_path / "out")
    assert exported["dtype"] == "bfloat16" and exported["text_config"]["dtype"] == "float16"
    assert "dtype" not in exported["vision_config"]


def test_small_files_are_copied_and_weights_of_other_formats_are_not(tmp_path: Path, group: Any) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3")
    kept = ["tokenizer.json", "chat_template.jinja", "preprocessor_config.json", "README.md"]
    left = ["pytorch_model.bin", "model.gguf", "old.safetensors", "pytorch_model.bin.index.json", "x.pt"]
    for name in kept + left:
        (hf_dir / name).write_text(name)
    (hf_dir / ".cache").mkdir()
    (hf_dir / "old.safetensors").unlink()
    model, conversions = loaded(hf_dir)
    export(model, tmp_path / "out", str(hf_dir), group, None, conversions)
    found = {p.name for p in (tmp_path / "out").iterdir()}
    assert found == {*kept, "config.json", "generation_config.json", "model.safetensors"}
    assert (tmp_path / "out" / "README.md").read_text() == "README.md"


def test_the_generation_settings_of_the_source_are_kept(tmp_path: Path, group: Any) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3")
    settings = {"eos_token_id": [2, 5], "temperature": 0.6, "do_sample": True, "pad_token_id": 0}
    (hf_dir / "generation_config.json").write_text(json.dumps(settings))
    model, conversions = loaded(hf_dir)
    export(model, tmp_path / "out", str(hf_dir), group, None, conversions)
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text()) == settings


# --- replacing and failing -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("exchanges", [True, False], ids=["exchange", "no exchange"])
def test_an_export_takes_the_place_of_the_one_before(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """Whole: no file of the old one is left, and what a model has mapped of it stays readable."""
    if not exchanges:
        monkeypatch.setattr(publish, "exchange", lambda one, other: False)
    first, second = (tiny_family_dir(tmp_path / f, f) for f in ("qwen3", "qwen3 tied"))
    out = tmp_path / "out"
    shutil.copytree(first, out)
    (out / "model-00002-of-00002.safetensors").write_text("stale")
    mapped, _ = loaded(first)
    model, conversions = loaded(second)
    export(model, out, str(second), group, None, conversions)
    assert_same(weights_in(out), load_file(second / "model.safetensors"))
    assert {p.name for p in tmp_path.iterdir()} == {"qwen3", "qwen3 tied", "out"}
    assert_same(dict(mapped.state_dict()), reference_tensors(first))


def test_a_model_is_exported_over_the_directory_it_was_loaded_from(tmp_path: Path, group: Any) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3_moe")
    expected = load_file(hf_dir / "model.safetensors")
    expected = {n: t.clone() for n, t in expected.items()}
    model, conversions = loaded(hf_dir)
    export(model, hf_dir, str(hf_dir), group, None, conversions)
    assert_same(weights_in(hf_dir), expected)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


@pytest.mark.parametrize("stage", ["the second tensor", "closing", "config"])
@pytest.mark.parametrize("exists", [False, True], ids=["new", "over another"])
def test_an_export_that_fails_leaves_nothing_of_itself(
    tmp_path: Path, group: Any, monkeypatch: pytest.MonkeyPatch, stage: str, exists: bool
) -> None:
    small_files(monkeypatch)
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3")
    model, conversions = loaded(hf_dir)
    out = tmp_path / "out"
    if exists:
        shutil.copytree(hf_dir, out)
    full = OSError(errno.ENOSPC, "No space left on device")
    written: list[str] = []
    write = SafetensorsWriter.write

    def no_space(self: SafetensorsWriter, *args: Any) -> None:
        written.append("tensor")
        if stage != "the second tensor" or len(written) > 1:
            raise full
        write(self, *args)

    if stage == "the second tensor":
        monkeypatch.setattr(SafetensorsWriter, "write", no_space)
    elif stage == "closing":
        monkeypatch.setattr(SafetensorsWriter, "close", no_space)
    else:
        monkeypatch.setattr(hf_export, "copy_small_files", no_space)
    with pytest.raises(
        CheckpointError, match=rf"'{out}' could not be exported: .*No space left.*nothing is left of it"
    ):
        export(model, out, str(hf_dir), group, None, conversions)
    assert {p.name for p in tmp_path.iterdir()} == ({"hf", "out"} if exists else {"hf"})
    if exists:
        assert_same(weights_in(out), load_file(hf_dir / "model.safetensors"))


def test_what_an_earlier_failure_left_is_removed(tmp_path: Path, group: Any) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3")
    (tmp_path / ".out.saving").mkdir()
    (tmp_path / ".out.saving" / "stale.json").touch()
    model, conversions = loaded(hf_dir)
    export(model, tmp_path / "out", str(hf_dir), group, None, conversions)
    assert not (tmp_path / "out" / "stale.json").exists()
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "out"}


class Own(torch.nn.Module):
    """None of transformers': a tied parameter, a buffer that is kept and one that isn't, a configuration."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.embed, self.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.rand(2))
        self.register_buffer("scratch", torch.rand(2), persistent=False)


def test_a_model_that_is_none_of_transformers_keeps_its_names(tmp_path: Path, group: Any) -> None:
    model = Own(ConfigReader({"width": 3, "inner": {"names": ["a"]}}))
    export(model, tmp_path / "out", None, group, None)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors", "config.json"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"width": 3, "inner": {"names": ["a"]}}
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"embed.weight", "scale"}
    again = Own(None)
    load_weights(again, open_weights(tmp_path / "out"))
    assert torch.equal(again.head.weight, model.head.weight) and torch.equal(again.scale, model.scale)


@pytest.mark.parametrize("config", [None, 7, {"act": torch.relu}])
def test_a_configuration_that_json_can_not_hold_is_left_out(tmp_path: Path, group: Any, config: Any) -> None:
    export(Own(config), tmp_path / "out", None, group, None)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {"model.safetensors"}


def test_weights_that_change_after_the_export_began_are_not_in_it(tmp_path: Path, group: Any) -> None:
    """The writer's thread has values of its own."""
    hf_dir = tiny_family_dir(tmp_path / "hf", "qwen3")
    model, conversions = loaded(hf_dir)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    export(model, tmp_path / "out", str(hf_dir), group, None, conversions)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert_same(weights_in(tmp_path / "out"), before)
