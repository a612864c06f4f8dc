"""`mm-convert`: there and back byte by byte; what it refuses, and what it leaves behind when it fails: nothing."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from mindspeed_mm.checkpoint import dcp_writer, hf_export, manifest, safetensors_writer
from mindspeed_mm.checkpoint.dcp_reader import DcpReader
from mindspeed_mm.checkpoint.sources import open_weights
from mindspeed_mm.checkpoint.weights import load_weights
from mindspeed_mm.tools.convert import main
from tests.support.tiny_families import assert_same, empty_model, reference_tensors, tiny_family_dir, weights_in

TO_DCP = ["GenericDCPConverter", "hf_to_dcp"]
TO_HF = ["GenericDCPConverter", "dcp_to_hf"]


def convert(*words: Any) -> int:
    return main([str(word) for word in words])


def to_dcp(hf_dir: Path, dcp_dir: Path, *words: Any) -> int:
    return convert(*TO_DCP, "--hf_dir", hf_dir, "--dcp_dir", dcp_dir, *words)


def to_hf(load_dir: Path, save_dir: Path, *words: Any) -> int:
    return convert(*TO_HF, "--load_dir", load_dir, "--save_dir", save_dir, *words)


@pytest.fixture
def hf_dir(tmp_path: Path) -> Path:
    return tiny_family_dir(tmp_path / "hf", "qwen3_moe", dtype=torch.bfloat16)


@pytest.fixture
def dcp_dir(tmp_path: Path, hf_dir: Path) -> Path:
    assert to_dcp(hf_dir, tmp_path / "dcp") == 0
    return tmp_path / "dcp"


# --- there and back ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "dtype", "shard"),
    [
        ("qwen2_5_vl tied", torch.float32, None),
        ("qwen3_moe", torch.float32, 100_000),
        ("qwen3_moe", torch.bfloat16, None),
        ("qwen3_vl_moe hub", torch.bfloat16, 100_000),
        ("internvl tied", torch.bfloat16, None),
        ("qwen2_5_omni hub", torch.float32, None),
    ],
)
def test_there_and_back_gives_the_same_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], family: str, dtype: torch.dtype, shard: int | None
) -> None:
    hf_dir = tiny_family_dir(tmp_path / "hf", family, dtype=dtype, max_shard_size=shard)
    (hf_dir / "tokenizer.json").write_text("{}")
    assert to_dcp(hf_dir, tmp_path / "dcp") == 0
    assert (tmp_path / "dcp" / "latest_checkpointed_iteration.txt").read_text().strip() == "release"
    assert "start a run from it with --load" in capsys.readouterr().out

    assert convert("verify", tmp_path / "dcp") == 0
    assert "release: whole (sizes and checksums of manifest.json)" in capsys.readouterr().out
    assert convert("info", tmp_path / "dcp") == 0
    printed = capsys.readouterr().out
    assert "run folder, latest: release" in printed and "weights only (no state.json)" in printed

    assert to_hf(tmp_path / "dcp", tmp_path / "out", "--model_assets_dir", hf_dir) == 0
    assert_same(weights_in(tmp_path / "out"), weights_in(hf_dir))
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    before, after = (json.loads((d / "config.json").read_text()) for d in (hf_dir, tmp_path / "out"))
    assert after == before
    assert convert("verify", tmp_path / "out") == 0


def test_a_converted_checkpoint_loads_and_has_the_names_of_the_model(tmp_path: Path, hf_dir: Path) -> None:
    for prefix in ("model.", "", "module."):
        target = tmp_path / f"dcp-{prefix}"
        assert to_dcp(hf_dir, target, "--dcp_prefix", prefix) == 0
        expected = reference_tensors(hf_dir)
        assert set(DcpReader(target / "release").tensors) == {prefix + name for name in expected}
        assert {DcpReader(target / "release").dtype(prefix + n) for n in expected} == {torch.bfloat16}
        model = empty_model(hf_dir)
        load_weights(model, open_weights(target / "release"))
        assert_same(dict(model.state_dict()), expected)


def test_torch_itself_reads_a_converted_checkpoint(dcp_dir: Path, hf_dir: Path) -> None:
    expected = reference_tensors(hf_dir)
    found = {f"model.{name}": torch.empty(t.shape, dtype=torch.bfloat16) for name, t in expected.items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.load(found, checkpoint_id=dcp_dir / "release", no_dist=True)
    assert all(torch.equal(found[f"model.{name}"].float(), tensor) for name, tensor in expected.items())


def test_a_prefix_in_the_files_can_be_taken_off(tmp_path: Path, hf_dir: Path) -> None:
    expected = reference_tensors(hf_dir)
    content = {f"policy.{n}": t for n, t in load_file(hf_dir / "model.safetensors").items()}
    save_file(content, hf_dir / "model.safetensors", {"format": "pt"})
    assert to_dcp(hf_dir, tmp_path / "refused") == 1
    assert to_dcp(hf_dir, tmp_path / "dcp", "--hf_prefix", "policy.") == 0
    model = empty_model(hf_dir)
    load_weights(model, open_weights(tmp_path / "dcp" / "release"))
    assert_same(dict(model.state_dict()), expected)


def test_dtype_of_the_written_weights(tmp_path: Path, hf_dir: Path, dcp_dir: Path) -> None:
    """What is asked for; else that of the same weight in the assets; else config.json's."""
    config_only = tmp_path / "assets"
    config_only.mkdir()
    shutil.copy(hf_dir / "config.json", config_only)
    trained = tmp_path / "trained"
    state = {f"model.{n}": t for n, t in reference_tensors(hf_dir).items()}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp.save(state, checkpoint_id=trained, no_dist=True)

    def dtypes(load_dir: Path, assets: Path, *words: str) -> set[Any]:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        assert to_hf(load_dir, tmp_path / "out", "--model_assets_dir", assets, *words) == 0
        said = json.loads((tmp_path / "out" / "config.json").read_text())["dtype"]
        return {said, *(str(t.dtype).removeprefix("torch.") for t in weights_in(tmp_path / "out").values())}

    assert dtypes(dcp_dir, hf_dir) == {"bfloat16"}
    assert dtypes(trained, hf_dir) == {"bfloat16"}
    assert dtypes(trained, config_only) == {"bfloat16"}
    assert dtypes(trained, hf_dir, "--dtype", "float32") == {"float32"}
    assert dtypes(dcp_dir, hf_dir, "--dtype", "fp16") == {"float16"}
    assert dtypes(trained, config_only, "--dtype", "float32") == {"float32"}
    assert dtypes(trained, hf_dir, "--dtype", "stored") == {"float32"}
    assert dtypes(dcp_dir, hf_dir, "--dtype", "stored") == {"bfloat16"}


def test_the_assets_are_those_that_a_run_remembers(tmp_path: Path, hf_dir: Path, dcp_dir: Path) -> None:
    release = dcp_dir / "release"
    (release / "state.json").write_text(json.dumps({"iteration": 3, "source": str(hf_dir)}))
    assert to_hf(release, tmp_path / "out") == 0
    assert_same(weights_in(tmp_path / "out"), weights_in(hf_dir))


@pytest.mark.parametrize("state", [None, {"source": "/no/such/dir"}, {}])
def test_without_assets_it_says_what_to_give(
    tmp_path: Path, dcp_dir: Path, capsys: pytest.CaptureFixture[str], state: dict[str, Any] | None
) -> None:
    if state is not None:
        (dcp_dir / "release" / "state.json").write_text(json.dumps(state))
    assert to_hf(dcp_dir, tmp_path / "out") == 1
    assert "give --model_assets_dir" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- arguments -----------------------------------------------------------------------------------------------------


def test_arguments_from_a_yaml_file(tmp_path: Path, hf_dir: Path) -> None:
    file = tmp_path / "convert.yaml"
    file.write_text(f"hf_dir: {hf_dir}\ndcp_dir: {tmp_path / 'from file'}\ndcp_prefix: module.\n")
    assert convert(*TO_DCP, "--config", file) == 0
    assert all(n.startswith("module.") for n in DcpReader(tmp_path / "from file" / "release").tensors)
    assert convert(*TO_DCP, "--config", file, "--dcp_dir", tmp_path / "given") == 0
    assert (tmp_path / "given" / "release").is_dir()


def test_arguments_from_environment_variables(tmp_path: Path, hf_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = "MM_CONVERT_GENERICDCPCONVERTER__HF_TO_DCP__"
    monkeypatch.setenv("JSONARGPARSE_DEFAULT_ENV", "true")
    monkeypatch.setenv(f"{prefix}HF_DIR", str(hf_dir))
    monkeypatch.setenv(f"{prefix}DCP_DIR", str(tmp_path / "dcp"))
    assert convert(*TO_DCP) == 0
    assert (tmp_path / "dcp" / "release").is_dir()


@pytest.mark.parametrize("words", [[], ["GenericDCPConverter"], ["info"]])
def test_wrong_arguments_end_with_a_usage_message(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert "usage: mm-convert" in capsys.readouterr().err


def test_published_options_without_effect_are_told(tmp_path: Path, hf_dir: Path, said: list[str]) -> None:
    assert to_dcp(hf_dir, tmp_path / "dcp", "--fused_linear_names", '["gate_up_proj"]') == 0
    assert any("--fused_linear_names has no effect" in line for line in said)
    said.clear()
    options = ["--dcp_prefix", "module.", "--hf_prefix", "x."]
    assert to_hf(tmp_path / "dcp", tmp_path / "out", "--model_assets_dir", hf_dir, *options) == 0
    assert any("--dcp_prefix has no effect" in line for line in said)
    assert any("--hf_prefix has no effect" in line for line in said)


def test_ties_have_no_effect_or_are_refused(
    tmp_path: Path, hf_dir: Path, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The files' tensors are kept, so a tie that says otherwise is an error."""
    tie = ["--tie_weight_mapping", '{"lm_head.weight": "model.embed_tokens.weight"}']
    tied = tiny_family_dir(tmp_path / "tied", "qwen3 tied")
    assert to_dcp(tied, tmp_path / "one", *tie) == 0
    assert said == ["--tie_weight_mapping has no effect: config.json says what is tied ('lm_head.weight')"]
    said.clear()
    assert to_dcp(hf_dir, tmp_path / "two", *tie) == 1
    assert "holds a tensor 'lm_head.weight' that isn't 'model.embed_tokens.weight'" in capsys.readouterr().err
    assert not (tmp_path / "two").exists()
    tie[1] = '{"lm_head.weight": "model.embed_token.weight"}'
    assert to_dcp(hf_dir, tmp_path / "three", *tie) == 0
    assert "no tensor 'model.embed_token.weight'; did you mean 'model.embed_tokens.weight'" in said[0]


def test_a_prefix_that_no_name_has_is_told(tmp_path: Path, hf_dir: Path, said: list[str]) -> None:
    assert to_dcp(hf_dir, tmp_path / "dcp", "--hf_prefix", "modle.") == 0
    assert said == [f"--hf_prefix 'modle.' has no effect: no name in '{hf_dir}' begins with it"]


def full_disk() -> OSError:
    return OSError(errno.ENOSPC, "No space left on device")


def full_disk_hidden() -> RuntimeError:
    """What torch's writer says when it stumbles a second time, closing the file."""
    error = RuntimeError("unexpected pos 64 vs 0")
    error.__context__ = full_disk()
    return error


# --- refusals and failures -----------------------------------------------------------------------------------------


def test_what_is_there_already_is_not_overwritten(
    tmp_path: Path, hf_dir: Path, dcp_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {p: p.read_bytes() for p in dcp_dir.rglob("*") if p.is_file()}
    assert to_dcp(hf_dir, dcp_dir) == 1
    assert f"--dcp_dir: '{dcp_dir / 'release'}' is there already" in capsys.readouterr().err
    assert {p: p.read_bytes() for p in dcp_dir.rglob("*") if p.is_file()} == before
    out = tmp_path / "out"
    out.mkdir()
    assert to_hf(dcp_dir, out, "--model_assets_dir", hf_dir) == 0  # an empty folder is none
    assert to_hf(dcp_dir, out, "--model_assets_dir", hf_dir) == 1
    assert f"--save_dir: '{out}' is there already" in capsys.readouterr().err


@pytest.mark.parametrize("given", ["nowhere", "empty", "checkpoint"])
def test_a_wrong_hf_dir_is_named(tmp_path: Path, dcp_dir: Path, capsys: pytest.CaptureFixture[str], given: str) -> None:
    (tmp_path / "empty").mkdir()
    path = dcp_dir if given == "checkpoint" else tmp_path / given
    assert to_dcp(path, tmp_path / "out") == 1
    printed = capsys.readouterr().err
    what = f"{path} does not exist" if given == "nowhere" else f"'{path}' has no config.json"
    assert what in printed and "expected a HF directory" in printed
    assert "model.json" not in printed  # which has no part in a conversion
    assert not (tmp_path / "out").exists()


def test_a_wrong_load_dir_is_named(tmp_path: Path, hf_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert to_hf(tmp_path / "nowhere", tmp_path / "out", "--model_assets_dir", hf_dir) == 1
    assert f"{tmp_path / 'nowhere'} does not exist" in capsys.readouterr().err


def test_weights_that_do_not_belong_to_config_json_are_refused(
    tmp_path: Path, hf_dir: Path, dcp_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = load_file(hf_dir / "model.safetensors")
    del content["model.norm.weight"]
    save_file(content, hf_dir / "model.safetensors", {"format": "pt"})
    assert to_dcp(hf_dir, tmp_path / "out") == 1
    assert "lacks 1 of Qwen3MoeForCausalLM's tensors: model.norm.weight" in capsys.readouterr().err
    other = tiny_family_dir(tmp_path / "other", "qwen3")
    assert to_hf(dcp_dir, tmp_path / "out", "--model_assets_dir", other) == 1
    assert "Qwen3ForCausalLM" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("stage", "error"),
    [
        ("tensors", full_disk()),
        ("tensors", full_disk_hidden()),
        ("tensors", KeyboardInterrupt()),
        ("checksums", full_disk()),
        ("checksums", KeyboardInterrupt()),
    ],
)
def test_a_failed_conversion_to_dcp_leaves_nothing(
    tmp_path: Path,
    hf_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    error: BaseException,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    if stage == "tensors":
        resolve, done = dcp_writer._OnDemand.resolve_data, []

        def fails_later(self: Any, item: Any) -> Any:
            done.append(item)
            return resolve(self, item) if len(done) < 5 else fail()

        monkeypatch.setattr(dcp_writer._OnDemand, "resolve_data", fails_later)
    else:
        monkeypatch.setattr(manifest, "sum_file", fail)
    if isinstance(error, Exception):
        assert to_dcp(hf_dir, tmp_path / "dcp") == 1
        printed = capsys.readouterr().err
        assert "No space left on device" in printed and "nothing is left of it" in printed
    else:
        with pytest.raises(KeyboardInterrupt):
            to_dcp(hf_dir, tmp_path / "dcp")
    assert not [p for p in (tmp_path / "dcp").rglob("*")]


@pytest.mark.parametrize("error", [full_disk(), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("stage", ["tensors", "config"])
def test_a_failed_conversion_to_hf_leaves_nothing(
    tmp_path: Path,
    hf_dir: Path,
    dcp_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException,
    stage: str,
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    if stage == "tensors":
        monkeypatch.setattr(safetensors_writer.SafetensorsWriter, "write", fail)
    else:
        monkeypatch.setattr(hf_export, "copy_small_files", fail)
    before = {p.name for p in tmp_path.iterdir()}
    if isinstance(error, OSError):
        assert to_hf(dcp_dir, tmp_path / "out", "--model_assets_dir", hf_dir) == 1
        assert "No space left on device" in capsys.readouterr().err
    else:
        with pytest.raises(KeyboardInterrupt):
            to_hf(dcp_dir, tmp_path / "out", "--model_assets_dir", hf_dir)
    assert {p.name for p in tmp_path.iterdir()} == before


def test_a_damaged_checkpoint_is_an_error_and_leaves_nothing(
    tmp_path: Path, hf_dir: Path, dcp_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = dcp_dir / "release" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])
    assert to_hf(dcp_dir, tmp_path / "out", "--model_assets_dir", hf_dir) == 1
    assert str(dcp_dir / "release") in capsys.readouterr().err
    assert not (tmp_path / "out").exists() and not (tmp_path / ".out.saving").exists()


# --- memory --------------------------------------------------------------------------------------------------------

_MEASURED = """
import os, re, sys, threading
import torch, transformers, transformers.core_model_loading, torch.distributed.checkpoint
from mindspeed_mm.checkpoint import hf_export, weights
from mindspeed_mm.tools.convert import main
def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1000
peak, stop = [0], threading.Event()
def watch():
    while not stop.wait(0.002):
        peak[0] = max(peak[0], anonymous())
main([w.replace("BIG", "SMALL") for w in sys.argv[1:]])
before = anonymous()
thread = threading.Thread(target=watch)
thread.start()
status = main([w.replace("BIG", "big") for w in sys.argv[1:]])
stop.set()
thread.join()
print("peak", peak[0] - before)
sys.exit(status)
"""


def growth(*words: Any) -> int:
    """Bytes that a conversion takes beyond those of the same conversion of a small model before."""
    command = [sys.executable, "-c", _MEASURED, *(str(word) for word in words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ})
    assert ended.returncode == 0, ended.stderr[-2000:]
    return int(ended.stdout.split("peak ")[1])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.full
def test_conversion_holds_a_few_tensors_and_not_the_model(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    for name, layers in (("SMALL", 1), ("big", 24)):
        sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = Qwen3Config(vocab_size=256, num_hidden_layers=layers, head_dim=64, **sizes)
        Qwen3ForCausalLM(config).save_pretrained(tmp_path / name)
    size = sum(p.stat().st_size for p in (tmp_path / "big").glob("*.safetensors"))
    assert size > 90_000_000
    assert growth(*TO_DCP, "--hf_dir", tmp_path / "BIG", "--dcp_dir", tmp_path / "dcp-BIG") < size / 3
    words = ["--load_dir", tmp_path / "dcp-BIG", "--save_dir", tmp_path / "out-BIG"]
    assert growth(*TO_HF, *words, "--model_assets_dir", tmp_path / "BIG") < size / 3
    assert_same(weights_in(tmp_path / "out-big"), weights_in(tmp_path / "big"))


# --- diffusers -----------------------------------------------------------------------------------------------------


def test_a_diffusers_model_goes_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With averages beside the weights, either is written."""
    from tests.support.tiny_diffusers import build_diffusers

    source, run = tmp_path / "wan", tmp_path / "run"
    build_diffusers("wan").to(torch.bfloat16).save_pretrained(source)
    weights = load_file(source / "diffusion_pytorch_model.safetensors")
    assert to_dcp(source, tmp_path / "dcp") == 0
    assert to_hf(tmp_path / "dcp", tmp_path / "back", "--model_assets_dir", source) == 0
    assert_same(load_file(tmp_path / "back/diffusion_pytorch_model.safetensors"), weights)
    assert (tmp_path / "back/config.json").read_text() == (source / "config.json").read_text()
    assert to_hf(tmp_path / "dcp", tmp_path / "none", "--model_assets_dir", source, "--averaged", "true") == 1
    assert "holds no averaged weights" in capsys.readouterr().err
    averages = {name: tensor + 1 for name, tensor in weights.items() if name != "scale_shift_table"}
    stored = {f"model.{n}": t.float() for n, t in weights.items()} | {
        f"ema.{n}": t.float() for n, t in averages.items()
    }
    dcp.save(stored, checkpoint_id=run)
    assert to_hf(run, tmp_path / "trained", "--model_assets_dir", source) == 0
    assert to_hf(run, tmp_path / "averaged", "--model_assets_dir", source, "--averaged", "true") == 0
    assert_same(load_file(tmp_path / "trained/diffusion_pytorch_model.safetensors"), weights)
    assert_same(load_file(tmp_path / "averaged/diffusion_pytorch_model.safetensors"), weights | averages)
    # the newest checkpoint of a run folder, and its best one
    folder = tmp_path / "folder"
    dcp.save(stored, checkpoint_id=folder / "iter_0000002")
    dcp.save({name: tensor + 1 for name, tensor in stored.items()}, checkpoint_id=folder / "iter_0000004")
    (folder / "latest_checkpointed_iteration.txt").write_text("4")
    best = ("--model_assets_dir", source, "--best", "true")
    assert to_hf(folder, tmp_path / "none", *best) == 1
    assert "has no best.json" in capsys.readouterr().err
    (folder / "best.json").write_text(json.dumps({"iteration": 2, "metric": "loss", "value": 1.25}))
    assert to_hf(folder, tmp_path / "best", *best) == 0
    assert_same(load_file(tmp_path / "best/diffusion_pytorch_model.safetensors"), weights)


def test_an_unknown_diffusers_class_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "WanTransformer3DModle"}')
    assert to_dcp(tmp_path, tmp_path / "dcp") == 1
    said = capsys.readouterr().err
    assert "names the class 'WanTransformer3DModle'" in said and "WanTransformer3DModel" in said
