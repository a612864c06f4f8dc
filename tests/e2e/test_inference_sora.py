"""inference_sora.py with tiny Wan models: what it makes, against diffusers' pipelines by themselves."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image

from mindspeed_mm.configs.sora_inference import SoRAInferenceConfig
from mindspeed_mm.tasks.generation import (
    Request,
    SamplingOptions,
    build_pipeline,
    generate,
    inference,
    open_pipeline,
)
from mindspeed_mm.tasks.generation.inference import main
from mindspeed_mm.tasks.generation.outputs import read_frames
from mindspeed_mm.utils.errors import CheckpointError, ConfigError
from mindspeed_mm.utils.sample_random import generator, sample_key
from tests.support.generation_runs import PROMPTS, write_prompts, write_run
from tests.support.tiny_diffusers import wan_inputs
from tests.support.tiny_wan import write_encoders

OPTIONS = SamplingOptions((5, 32, 48), steps=3, guidance=(3.0,), seed=7)
ONE = (Request(PROMPTS[0]),)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    return write_encoders(tmp_path_factory.mktemp("encoders"))


@pytest.fixture(scope="module")
def pixel(tmp_path_factory, encoders):
    return write_run(tmp_path_factory.mktemp("pixel") / "r", encoders, pixel=True)


@pytest.fixture(scope="module")
def video(tmp_path_factory, encoders):
    return write_run(tmp_path_factory.mktemp("video") / "r", encoders)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return write_prompts(tmp_path_factory.mktemp("prompts"))


def _words(run, prompts, target, /, *more, **changes):
    """A launch command; `changes` are flags of it with other words, `more` further words."""
    flags = {
        "mm_model": run.model_json, "load": run.folder, "prompts": prompts, "save_path": target, "size": (1, 12, 20),
        "num_inference_steps": 3, "guidance_scale": 3, "num_samples_per_prompt": 2, **changes,
    }  # fmt: skip
    words = []
    for name, value in flags.items():
        values = value if isinstance(value, tuple) else (value,)
        words += ["--" + name.replace("_", "-"), *map(str, values)]
    return [*words, *more]


def _run_words(words):
    main(words)


def _pictures(folder):
    return {path.name: read_frames(path)[0].astype(int) for path in sorted(folder.glob("sample_*.png"))}


def _theirs(run, weights, options, *, task="WanPipeline", requests=ONE, **parts):
    """diffusers' own pipeline of the same parts, one sample at a time."""
    import diffusers
    from transformers import AutoTokenizer, CLIPImageProcessor, CLIPVisionModel, UMT5EncoderModel

    folder = run.encoders
    if "image_dim" in run.config:
        parts["image_encoder"] = CLIPVisionModel.from_pretrained(folder / "image_encoder")
        parts["image_processor"] = CLIPImageProcessor.from_pretrained(folder / "image_encoder")
    pipeline = getattr(diffusers, task)(
        tokenizer=AutoTokenizer.from_pretrained(folder / "tokenizer"),
        text_encoder=UMT5EncoderModel.from_pretrained(folder / "text_encoder"),
        vae=diffusers.AutoencoderKLWan.from_pretrained(folder / "vae"),
        scheduler=parts.pop("scheduler", diffusers.FlowMatchEulerDiscreteScheduler(shift=5.0)),
        transformer=run.predictor(weights),
        **parts,
    )
    pipeline.set_progress_bar_config(disable=True)
    frames, height, width = options.size
    made = []
    for request in requests:
        more = {"image": request.image} if request.image is not None else {}
        if len(options.guidance) > 1:
            more["guidance_scale_2"] = options.guidance[1]
        noise = generator(sample_key(options.seed, request.index, request.sample), "noise")
        result = pipeline(
            prompt=request.prompt, height=height, width=width, num_frames=frames, generator=noise,
            num_inference_steps=options.steps, guidance_scale=options.guidance[0], max_sequence_length=12, **more,
        )  # fmt: skip
        made.append((result.frames[0] * 255).round().astype(int))
    return made


def _ours(run, options, requests=ONE, **how):
    made = build_pipeline(SoRAInferenceConfig.from_file(run.model_json), **{"load": run.folder, **how})
    return [frames.astype(int) for frames in generate(made, list(requests), options)]


def _close(ours, theirs):
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert np.abs(one - other).max() <= 1  # 8 bits, rounded from floats that differ in their last places


def test_a_video_is_the_one_that_diffusers_makes(video):
    requests = [Request(PROMPTS[0], 0, 1), Request(PROMPTS[1], 4, 0)]
    averaged = _ours(video, OPTIONS, requests)
    _close(averaged, _theirs(video, video.averaged, OPTIONS, requests=requests))
    trained = _ours(video, OPTIONS, requests, ema=False)
    _close(trained, _theirs(video, video.trained, OPTIONS, requests=requests))
    assert np.abs(averaged[0] - trained[0]).max() > 4
    assert np.abs(averaged[0] - averaged[1]).max() > 4


def test_from_an_export_as_from_a_checkpoint(video, tmp_path):
    from diffusers import WanPipeline

    expected = _ours(video, OPTIONS, ema=False)
    video.predictor(video.trained).save_pretrained(tmp_path / "transformer")
    np.testing.assert_array_equal(_ours(video, OPTIONS, load=tmp_path / "transformer"), expected)
    made = build_pipeline(SoRAInferenceConfig.from_file(video.model_json), load=video.folder, ema=False)
    assert isinstance(made.pipeline, WanPipeline)
    made.pipeline.save_pretrained(tmp_path / "whole")
    opened = open_pipeline(tmp_path / "whole", dtype="fp32")
    # by itself a pipeline pads prompts to 512 tokens
    opened = type(opened)(opened.pipeline, opened.rule, opened.needs_image, opened.latent_channels, 12)
    np.testing.assert_array_equal([f.astype(int) for f in generate(opened, [Request(PROMPTS[0])], OPTIONS)], expected)
    # the whole pipeline's transformer with model.json's other parts
    np.testing.assert_array_equal(_ours(video, OPTIONS, load=tmp_path / "whole"), expected)


def test_first_frames(tmp_path, encoders):
    run = write_run(tmp_path / "r", encoders, "i2v")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    requests = [
        Request(PROMPTS[0], 0, 0, image),
        Request(PROMPTS[1], 1, 0, image.transpose(Image.Transpose.ROTATE_180)),
    ]
    theirs = _theirs(run, run.averaged, OPTIONS, task="WanImageToVideoPipeline", requests=requests)
    _close(_ours(run, OPTIONS, requests), theirs)
    with pytest.raises(ConfigError, match="begins with a picture; give --images"):
        _ours(run, OPTIONS)


def test_a_known_first_frame(tmp_path, encoders):
    run = write_run(tmp_path / "r", encoders, "ti2v")
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    requests = [Request(PROMPTS[0], 0, 0, image)]
    more = {"task": "WanImageToVideoPipeline", "requests": requests, "expand_timesteps": True}
    _close(_ours(run, OPTIONS, requests), _theirs(run, run.averaged, OPTIONS, **more))


def test_two_experts_and_unipc(video, tmp_path):
    import diffusers

    content = json.loads(video.model_json.read_text())
    video.predictor(video.averaged).save_pretrained(tmp_path / "low")
    content |= {
        "low_noise_predictor": str(tmp_path / "low"), "boundary_ratio": 0.875, "pipeline_class": "WanPipeline",
        "diffusion": {"model_id": "UniPCMultistepScheduler", "flow_shift": 3.0, "guidance_scale": [4.0, 2.0]},
    }  # fmt: skip
    config = SoRAInferenceConfig.from_dict(content)
    assert config.sampling.diffusion.guidance_scale == [4.0, 2.0]
    options = SamplingOptions(OPTIONS.size, steps=4, guidance=(4.0, 2.0))
    made = build_pipeline(config, load=video.folder, ema=False)
    scheduler = diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000
    )
    both = {"transformer_2": video.predictor(video.averaged), "boundary_ratio": 0.875, "scheduler": scheduler}
    theirs = _theirs(video, video.trained, options, **both)
    _close([frames.astype(int) for frames in generate(made, [Request(PROMPTS[0])], options)], theirs)
    assert np.abs(theirs[0] - _ours(video, options.__class__(OPTIONS.size, 4, (4.0,)), ema=False)[0]).max() > 1
    with pytest.raises(ConfigError, match="'boundary_ratio' is missing"):
        build_pipeline(SoRAInferenceConfig.from_dict({**content, "boundary_ratio": None}), load=video.folder)


def test_adapters_of_both_experts(video, prompts, tmp_path):
    """By flag, by key of model.json, and of a whole pipeline: what diffusers' own `load_lora_weights` makes."""
    from diffusers import WanPipeline
    from peft import LoraConfig, get_peft_model_state_dict

    files, merged = {}, {}
    for seed, name in enumerate(("transformer", "transformer_2")):
        torch.manual_seed(seed)
        model = video.predictor(video.trained)
        model.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=["to_q", "to_v"], init_lora_weights=False))
        settings = {
            k: sorted(v) if isinstance(v, set) else v for k, v in model.peft_config["default"].to_dict().items()
        }
        files[name] = tmp_path / name
        WanPipeline.save_lora_weights(
            files[name], get_peft_model_state_dict(model), transformer_lora_adapter_metadata=settings
        )
        merged[name] = model.eval()
    inputs = wan_inputs()

    def check(made, *names):
        for name in names:
            with torch.no_grad():
                found, expected = (m(**inputs)[0] for m in (made.pipeline.components[name], merged[name]))
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)

    config = SoRAInferenceConfig.from_file(video.model_json)
    check(build_pipeline(config, load=video.folder, ema=False, adapters=files["transformer"]), "transformer")
    with pytest.raises(ConfigError, match=r"adapters for a second expert .* and there is none"):
        build_pipeline(config, load=video.folder, ema=False, low_noise_adapters=files["transformer_2"])
    video.predictor(video.trained).save_pretrained(tmp_path / "low")
    content = json.loads(video.model_json.read_text()) | {
        "low_noise_predictor": str(tmp_path / "low"), "boundary_ratio": 0.875,
        "lora_load": str(files["transformer"]), "low_noise_lora_load": str(files["transformer_2"]),
    }  # fmt: skip
    made = build_pipeline(SoRAInferenceConfig.from_dict(content), load=video.folder, ema=False)
    check(made, "transformer", "transformer_2")
    build_pipeline(config, load=video.folder, ema=False).pipeline.save_pretrained(tmp_path / "whole")
    check(open_pipeline(tmp_path / "whole", dtype="fp32", adapters=files["transformer"]), "transformer")
    words = _words(
        video, prompts, tmp_path / "made", size=OPTIONS.size, num_samples_per_prompt=1, lora_load=tmp_path / "x"
    )
    with pytest.raises(ConfigError, match=r"--lora-load: .*x does not exist"):
        main(words)


def test_pictures_their_index_and_a_rerun(pixel, prompts, tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert main(_words(pixel, prompts, out)) == 0
    records = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [(r["prompt"], r["sample"]) for r in records] == [(p, s) for p in PROMPTS for s in range(2)]
    assert records[0]["file"] == "sample_00000_0.png" and records[0]["seed"] == 42 and records[0]["steps"] == 3
    assert records[0]["guidance"] == [3.0] and records[0]["seconds"] > 0
    pictures = _pictures(out)
    assert len(pictures) == 6 and all(picture.shape == (12, 20, 3) for picture in pictures.values())
    distances = [np.abs(a - b).max() for n, a in pictures.items() for m, b in pictures.items() if n < m]
    assert min(distances) > 4
    sheet = np.asarray(Image.open(out / "contact_sheet.png").convert("RGB"))
    assert sheet.shape[0] > 3 * 60 and sheet.shape[1] > 2 * 100 and len(np.unique(sheet.reshape(-1, 3), axis=0)) > 50
    # of six samples one is lost: it alone is made again, and the same
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("sample_*")}
    (out / "sample_00001_1.png").unlink()
    said = []
    monkeypatch.setattr(inference, "info_rank0", said.append)
    main(_words(pixel, prompts, out))
    after = {path.name: path.stat().st_mtime_ns for path in out.glob("sample_*")}
    assert [name for name in after if after[name] != before[name]] == ["sample_00001_1.png"]
    assert any("6 samples of (1, 12, 20): 1 to be made" in line for line in said)
    again = _pictures(out)
    np.testing.assert_array_equal(again["sample_00001_1.png"], pictures["sample_00001_1.png"])
    with pytest.raises(ConfigError, match=r"sample_00000_0.png' was made with seed 42, now it is 43; add --overwrite"):
        main(_words(pixel, prompts, out, seed=43))
    main(_words(pixel, prompts, out, "--overwrite", seed=43))
    assert np.abs(_pictures(out)["sample_00000_0.png"] - pictures["sample_00000_0.png"]).max() > 4


def test_two_processes_and_batches_make_the_same(pixel, prompts, tmp_path, ranks2):
    main(_words(pixel, prompts, tmp_path / "one"))
    ranks2.run(_run_words, _words(pixel, prompts, tmp_path / "two"))
    main(_words(pixel, prompts, tmp_path / "batches", batch_size=4))
    one, two, batches = (_pictures(tmp_path / name) for name in ("one", "two", "batches"))
    assert one.keys() == two.keys() == batches.keys()
    for name, picture in one.items():
        np.testing.assert_array_equal(two[name], picture)
        assert np.abs(batches[name] - picture).max() <= 1
    index = [(tmp_path / name / "samples.jsonl").read_text().splitlines() for name in ("one", "two")]
    shown = [[{**json.loads(line), "seconds": 0} for line in lines] for lines in index]
    assert shown[0] == shown[1]
    assert (tmp_path / "two" / "contact_sheet.png").is_file()


def test_videos_of_the_command(video, prompts, tmp_path):
    out = tmp_path / "out"
    main(_words(video, prompts, out, "--bf16", size=(5, 32, 48), fps=8, micro_batch_size=1))
    frames = read_frames(out / "sample_00002_1.mp4")
    assert len(frames) == 5 and frames[0].shape == (32, 48, 3)
    record = json.loads((out / "samples.jsonl").read_text().splitlines()[0])
    assert record["fps"] == 8 and record["weights"].endswith("iter_0000005 (averaged)")
    import av

    with av.open(str(out / "sample_00000_0.mp4")) as container:
        assert container.streams.video[0].average_rate == 8
        assert container.streams.video[0].codec_context.name == "h264"


def test_first_frames_of_the_command(tmp_path, encoders, prompts):
    run = write_run(tmp_path / "r", encoders, "i2v")
    for number in range(3):
        Image.new("RGB", (40, 40), (80 * number, 0, 0)).save(tmp_path / f"{number}.png")
    images = tmp_path / "images.txt"
    images.write_text("0.png\n1.png\n2.png\n")
    words = _words(run, prompts, tmp_path / "out", size=(5, 16, 32))
    main([*words, "--images", str(images)])
    assert len(list((tmp_path / "out").glob("*.mp4"))) == 6
    images.write_text("0.png\n1.png\n")
    with pytest.raises(ConfigError, match="2 pictures for 3 prompts"):
        main([*words, "--images", str(images)])
    images.write_text("0.png\n1.png\n9.png\n")
    with pytest.raises(ConfigError, match=r"line 3: 9.png does not exist"):
        main([*words, "--images", str(images)])


def test_messages(pixel, video, prompts, tmp_path):
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    for changes, error, match in (
        ({"prompts": empty}, ConfigError, "holds no prompts"),
        ({"num_inference_step": 3}, ConfigError, "did you mean '--num-inference-steps'"),
        ({"size": (1, 12, 21)}, ConfigError, r"multiples of 2; the nearest is 1 12 22"),
        ({"size": (1, 12)}, ConfigError, "--size is 1 12; expected frames, height and width"),
        ({"guidance_scale": (3, 2)}, ConfigError, "guidance_scale holds 2 values"),
        ({"ckpt_step": 4}, CheckpointError, "iter_0000004' is missing"),
        ({"load": tmp_path}, CheckpointError, "holds no weights; expected a run folder"),
        ({"load": video.folder}, CheckpointError, "has shape"),
        ({"load": tmp_path / "none"}, ConfigError, "--load: .* does not exist"),
        ({"images": prompts}, ConfigError, r"line 1: a cat runs does not exist"),
        ({"sampler": "dpm"}, ConfigError, "expected one of euler, unipc"),
    ):
        with pytest.raises(error, match=match):
            main(_words(pixel, prompts, tmp_path / "out", **changes))
    with pytest.raises(ConfigError, match=r"expected 4·k \+ 1 frames .* multiples of 16; the nearest is 5 32 48"):
        main(_words(video, prompts, tmp_path / "out", size=(6, 33, 44)))
    with pytest.raises(ConfigError, match=r"--mm-model .* is missing"):
        main(["--prompts", str(prompts)])
    shutil.copytree(pixel.folder, tmp_path / "no_average")
    _drop_averages(tmp_path / "no_average", pixel)
    with pytest.raises(CheckpointError, match="holds no averaged weights"):
        main(_words(pixel, prompts, tmp_path / "out", "--ema", load=tmp_path / "no_average"))


def _drop_averages(folder, run):
    import torch.distributed.checkpoint as dcp

    shutil.rmtree(folder / "iter_0000005")
    kept = {f"model.{name}": value for name, value in run.trained.items()}
    with torch.no_grad():
        dcp.save(kept, checkpoint_id=folder / "iter_0000005", no_dist=True)
