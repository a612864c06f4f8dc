"""`mindspeed-mm init` on diffusers pipelines: shapes of pictures and clips, and what can't be trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image

from mindspeed_mm.configs.describe import describe
from mindspeed_mm.dry_run import dry_run
from mindspeed_mm.tasks.train.generation import SORA
from mindspeed_mm.tools.cli import main
from tests.support.clips import write_clip
from tests.support.first_rows import CAPTIONS, ROWS


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A small pipeline of pictures, and one of videos."""
    from tests.support import tiny_image_pipelines

    root = tmp_path_factory.mktemp("pipelines")
    for name in ("sd3", "wan"):
        getattr(tiny_image_pipelines, name)().save_pretrained(root / name)
    return {name: root / name for name in ("sd3", "wan")}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def pictures(*sizes: tuple[int, int]) -> Path:
    """Captioned pictures of these heights and widths, in a folder with metadata."""
    folder = Path("pictures")
    folder.mkdir()
    rows = []
    for number, (height, width) in enumerate(sizes):
        Image.fromarray(np.zeros((height, width, 3), dtype=np.uint8)).save(folder / f"{number}.png")
        rows.append({"file_name": f"{number}.png", "text": "black"})
    (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def with_clips(folder: Path, *frames: int) -> Path:
    """Add clips of so many frames."""
    with open(folder / "metadata.jsonl", "a") as file:
        for number, count in enumerate(frames):
            write_clip(folder / f"{number}.mp4", frames=count, size=(64, 64))
            file.write(json.dumps({"file_name": f"{number}.mp4", "text": "numbers"}) + "\n")
    return folder


def written(model: Path, data: Path, *words: str) -> dict[str, Any]:
    """The preprocess_parameters that init writes; the run is accepted."""
    assert main(["init", "--model", str(model), "--data", str(data), "--output", "run", *words]) == 0
    describe(["run/run.yaml"], SORA)
    content = yaml.safe_load(Path("run", "run.yaml").read_text())
    shape = content["data"]["dataset_param"]["preprocess_parameters"]
    assert shape.pop("cfg") == 0.1
    return shape


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([(70, 100)], {"num_frames": 1, "max_height": 64, "max_width": 96}),
        ([(8, 8)], {"num_frames": 1, "max_height": 16, "max_width": 16}),
        ([(1000, 500)], {"num_frames": 1, "max_height": 352, "max_width": 176}),
        (
            [(64, 96), (96, 64), (80, 80)],
            {
                "num_frames": 1,
                "max_height": 64,
                "max_width": 64,
                "force_resolution": False,
                "max_hxw": 6144,
            },
        ),
    ],
)
def test_shapes_of_pictures(
    sizes: Sequence[tuple[int, int]], expected: dict[str, Any], pipelines: dict[str, Path]
) -> None:
    assert written(pipelines["sd3"], pictures(*sizes)) == expected


def test_shapes_of_clips(pipelines: dict[str, Path]) -> None:
    shape = written(pipelines["wan"], with_clips(pictures(), 11, 16))
    assert shape == {"num_frames": 9, "max_height": 64, "max_width": 64}


def test_shapes_of_clips_among_pictures(pipelines: dict[str, Path]) -> None:
    shape = written(pipelines["wan"], with_clips(pictures((64, 64)), 11))
    assert shape == {"buckets": [[9, 64, 64], [1, 64, 64]]}


def test_some_of_many_pictures_validate(pipelines: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    folder = pictures((64, 64))
    row = (folder / "metadata.jsonl").read_text()
    (folder / "metadata.jsonl").write_text(row * 400)
    written(pipelines["sd3"], folder)
    content = yaml.safe_load(Path("run", "run.yaml").read_text())
    assert content["data"]["dataset_param"]["basic_parameters"]["val_rate"] == 0.05
    capsys.readouterr()
    assert dry_run(SORA, ["run/run.yaml", "--dry-run"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["steps_per_epoch"] == content["gpt_args"]["eval_interval"] == (400 - 20) // 32


def test_captions_beside_pictures_are_written_once(pipelines: dict[str, Path]) -> None:
    written(pipelines["sd3"], CAPTIONS["beside"](Path()))
    rows = [json.loads(line) for line in Path("run", "captions.jsonl").read_text().splitlines()]
    assert len(rows) == 30 and rows[3] == {"path": "003.png", "caption": "waves 3"}


def _without(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        for name in names:
            path = folder / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return change


def _index(**changes: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        file = folder / "model_index.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))

    return change


def _unet(folder: Path) -> None:
    shutil.move(folder / "transformer", folder / "unet")
    _index(unet=["diffusers", "UNet2DConditionModel"], _class_name="StableDiffusionPipeline")(folder)


def _of_another_class(folder: Path) -> None:
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "_class_name": "SanaTransformer2DModel"}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_unet, "its denoiser is a UNet, and diffusion transformers are trained here; found "),
        (_without("transformer/diffusion_pytorch_model.safetensors"), "'model/transformer' has no weights"),
        (_without("vae/diffusion_pytorch_model.safetensors"), "'model/vae' has no weights"),
        (_without("model_index.json"), "has no config.json; did you mean 'model/"),
        (
            _index(_class_name="StableDiffusion3InpaintPipeline"),
            "is a StableDiffusion3InpaintPipeline; sd3 is trained",
        ),
        (_of_another_class, "holds a SanaTransformer2DModel; expected one of"),
    ],
)
def test_directories(
    change: Callable[[Path], None], said: str, pipelines: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    change(Path(shutil.copytree(pipelines["sd3"], "model")))
    assert main(["init", "--model", "model", "--data", str(pictures((8, 8))), "--output", "run"]) == 1
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


def _no_captions() -> Path:
    folder = CAPTIONS["beside"](Path())
    (folder / "004.txt").unlink()
    return folder


def _no_picture() -> Path:
    folder = CAPTIONS["beside"](Path())
    (folder / "004.png").write_text("none")
    return folder


def _nothing() -> Path:
    Path("empty").mkdir()
    Path("empty", "readme.md").touch()
    return Path("empty")


def _lost_picture() -> Path:
    folder = CAPTIONS["metadata"](Path())
    (folder / "004.png").unlink()
    return folder


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (
            _no_captions,
            "1 of 30 pictures have no caption: expected a file '004.txt' beside '004.png', or one",
        ),
        (_no_picture, "1 of 30 rows that were looked at can't be used: 1 × "),
        (
            _nothing,
            "'empty' has neither an annotation file (metadata.jsonl with a path and a caption a line)",
        ),
        (
            _lost_picture,
            "1 of 30 rows that were looked at can't be used: 1 × image not found: pictures/metadata.json",
        ),
        (lambda: ROWS["messages"](Path()), "no column path or video or image or file_name; found messages"),
        (lambda: with_clips(pictures(), 3), "1 rows are clips, and SD3Transformer2DModel of --model"),
    ],
)
def test_rows(
    write: Callable[[], Path], said: str, pipelines: dict[str, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["init", "--model", str(pipelines["sd3"]), "--data", str(write()), "--output", "run"]) == 1
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


def test_flags_of_language_models(pipelines: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["init", "--model", str(pipelines["sd3"]), "--data", "x", "--output", "run"]
    for more in (["--backend", "megatron"], ["--template", "qwen"], ["--attr", "images=a"]):
        assert main([*words, *more]) == 1
        assert f"{' '.join(more[:2]) if more[0] == '--backend' else more[0]} is of language" in capsys.readouterr().err
