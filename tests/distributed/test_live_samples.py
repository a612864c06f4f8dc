"""--sample-interval: samples are those of inference with the checkpoint of the same step; training is that without."""

from __future__ import annotations

import functools
import io
import json
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from mindspeed_mm.configs.sora_inference import SoRAInferenceConfig
from mindspeed_mm.monitor.recording.thumbnails import as_jpeg
from mindspeed_mm.tasks.generation import Request, SamplingOptions, build_pipeline, generate
from mindspeed_mm.tasks.generation.outputs import read_frames
from tests.support.launch import launch_flags, metrics_of, run_entry
from tests.support.tiny_diffusers import build_diffusers
from tests.support.tiny_wan import data_json, model_json, write_clips, write_encoders
from tests.support.workers import RankPool

STEPS, INTERVAL, INFERENCE = 4, 2, 3  # optimizer steps, and denoising steps
#: dropout draws from the random states, in which a sheet of samples must leave no trace
LORA = {"lora_r": 4, "lora_target_modules": "to_q,to_v", "lora_dropout": 0.5}


@dataclass(frozen=True)
class Case:
    """A run of a generation model.

    Attributes:
        ranks: number of processes.
        task: t2v or i2v.
        model: keys of model.json.
        fsdp2: keys of fsdp2.yaml.
        flags: of the launch.
        features: whether it trains on features.
        dtype: of inference.
        prompts: whether prompts come from a file: three, which two processes can't share evenly.
        off: largest difference of a pixel; inference with adapters merges them, which rounds.
    """

    ranks: int = 2
    task: str = "t2v"
    model: dict[str, Any] = field(default_factory=dict)
    fsdp2: dict[str, Any] = field(default_factory=dict)
    flags: dict[str, Any] = field(default_factory=dict)
    features: bool = False
    dtype: str = "fp32"
    prompts: bool = False
    off: int = 0


CASES = {"averaged weights, prompts of a file": Case(model={"use_ema": True}, prompts=True)}
MORE_CASES = {
    "1 process, compiled": Case(1, fsdp2={"compile": True, "compile_backend": "aot_eager"}),
    "captions": Case(),
    "encoders ahead, ZeRO-2": Case(model={"encoder_offload_interval": 2}, fsdp2={"reshard_after_forward": False}),
    "pictures first": Case(1, "i2v"),
    "LoRA": Case(model={"use_ema": True}, flags=LORA, off=2),
    "bf16": Case(flags={"bf16": True}, dtype="bf16"),
    "features": Case(1, features=True),
}


@functools.cache
def files() -> tuple[Path, Path]:
    """The frozen parts, and the annotations of clips."""
    folder = Path(tempfile.mkdtemp(prefix="live-samples-"))
    return write_encoders(folder / "encoders"), write_clips(folder / "clips", rows=8)


@functools.cache
def transformer() -> Path:
    """A directory of the transformer, for adapters on top of it."""
    folder = Path(tempfile.mkdtemp(prefix="live-samples-")) / "transformer"
    build_diffusers("wan", seed=1).save_pretrained(folder)
    return folder


def words_of(case: Case, folder: Path, data: Path, **flags: Any) -> list[str]:
    """Words of a launch; its files and its run folder are in `folder`."""
    model = model_json(files()[0], case.task, **case.model)
    if "lora_r" in case.flags:
        model["predictor"] = {"from_pretrained": str(transformer())}
    if case.features:
        model |= {"load_video_features": True, "load_text_features": True}
    contents = {
        "model.json": json.dumps(model),
        "data.json": json.dumps(data_json(data)),
        "tools.json": "{}",
        "fsdp2.yaml": yaml.safe_dump({"sub_modules_to_wrap": ["predictor.blocks.{*}"], **case.fsdp2}),
    }
    folder.mkdir()
    for name, text in contents.items():
        (folder / name).write_text(text)
    settings = {"micro_batch_size": 1, "global_batch_size": 4, "train_iters": STEPS, "eval_interval": 0}
    settings |= {"save": folder / "run", "save_interval": INTERVAL, "no_save_optim": True, **case.flags}
    return launch_flags({name: folder / name for name in contents}, **settings, **flags)


def extracted(folder: Path) -> Path:
    """Features of the clips."""
    from mindspeed_mm.tools.cli import main as tools

    folder.mkdir()
    (folder / "model.json").write_text(json.dumps(model_json(files()[0])))
    (folder / "data.json").write_text(json.dumps(data_json(files()[1])))
    inputs = ["--mm-model", str(folder / "model.json"), "--mm-data", str(folder / "data.json")]
    output = folder / "features"
    assert tools(["data", "extract-features", *inputs, "--output", str(output), "--num-workers", "0"]) == 0
    return output


def inferred(folder: Path, step: int, prompts: list[str], dtype: str) -> list[np.ndarray]:
    """What inference makes of a checkpoint: the frames of each prompt."""
    config = SoRAInferenceConfig.from_file(folder / "model.json")
    pipeline = build_pipeline(config, load=folder / "run", step=step, dtype=dtype)
    options = SamplingOptions((5, 32, 32), INFERENCE, seed=42)
    return [generate(pipeline, [Request(prompt, index)], options)[0] for index, prompt in enumerate(prompts)]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.full) for name in MORE_CASES)])
def test_samples_are_those_of_inference_and_leave_no_trace(
    name: str, ranks1: RankPool, ranks2: RankPool, tmp_path: Path
) -> None:
    case = (CASES | MORE_CASES)[name]
    pool = ranks1 if case.ranks == 1 else ranks2
    data = extracted(tmp_path / "extracted") if case.features else files()[1]
    prompts = [json.loads(line)["cap"] for line in files()[1].read_text().splitlines()][:4]
    asked = {"sample_interval": INTERVAL, "sample_inference_steps": INFERENCE, "no_report": None}
    if case.prompts:
        prompts = ["a red cat", "slow dog", "is there a dog"]
        (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n")
        asked["sample_prompts"] = tmp_path / "prompts.txt"
    for folder, flags in (("with", asked), ("without", {})):
        pool.run(run_entry, words_of(case, tmp_path / folder, data, **flags), "pretrain_sora.py")
    assert metrics_of(tmp_path / "with" / "run") == metrics_of(tmp_path / "without" / "run")

    report = tmp_path / "with" / "run" / "report"
    lines = [json.loads(line) for line in (report / "generated.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [INTERVAL] * len(prompts) + [STEPS] * len(prompts)
    assert [line["prompt"] for line in lines] == 2 * prompts
    assert all(len(line["files"]) == 4 for line in lines)
    if case.task == "t2v":
        for line, frames in zip(lines, inferred(tmp_path / "with", INTERVAL, prompts, case.dtype), strict=False):
            assert len(read_frames(report / line["video"])) == 5
            for name, frame in zip(line["files"], frames[[0, 1, 3, 4]], strict=True):
                expected = np.asarray(Image.open(io.BytesIO(as_jpeg(frame, 512)))).astype(int)
                assert abs(np.asarray(Image.open(report / name)).astype(int) - expected).max() <= case.off
    first, last = ((report / line["files"][0]).read_bytes() for line in lines[:: len(prompts)])
    assert first != last  # the weights have changed in between
    with Image.open(report / lines[-1]["files"][0]) as picture:
        assert (picture.format, picture.size) == ("JPEG", (32, 32))
