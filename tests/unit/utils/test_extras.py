"""A package that only some runs need and that is missing: one sentence, which names the extra that brings it."""

from __future__ import annotations

import importlib.abc
import json
import sys
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mindspeed_mm.configs.data_config import PreprocessParameters
from mindspeed_mm.configs.describe import describe
from mindspeed_mm.configs.flags.trackers import TRACKERS
from mindspeed_mm.data.adapter import DefaultAdapter
from mindspeed_mm.data.generation import captions
from mindspeed_mm.data.loading.usable import require_media_packages
from mindspeed_mm.data.media.containers import open_container
from mindspeed_mm.data.media.media import MediaRef
from mindspeed_mm.data.sources.table_files import ParquetFile
from mindspeed_mm.tasks.generation import inference
from mindspeed_mm.tasks.generation.outputs import read_frames
from mindspeed_mm.tools import convert, data_check
from mindspeed_mm.tools.feature_extraction import command
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import EXTRAS, is_installed, missing_library, missing_library_as_sentence, require_extra
from tests.support.apart import TORCHAO
from tests.support.runs import OWN

ROOT = Path(__file__).resolve().parents[3]
WORDS = "--micro-batch-size 1 --lr 1e-4 --train-iters 1".split()  # noqa: SIM905
TORCHVISION = """
Qwen2VLVideoProcessor requires the Torchvision library but it was not found in your environment. Check out the
instructions on the installation page.
"""


class _Hidden(importlib.abc.MetaPathFinder):
    """Finds nothing of some packages, in front of those who would."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if self.hides(name):
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)

    def hides(self, name: str) -> bool:
        return any(name == hidden or name.startswith(hidden + ".") for hidden in self.names)


@pytest.fixture
def hide(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Make packages look as if they weren't installed."""

    def call(*names: str) -> None:
        hidden = _Hidden(names)
        for name in [name for name in sys.modules if hidden.hides(name)]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setattr(sys, "meta_path", [hidden, *sys.meta_path])

    return call


def test_every_extra_of_the_package_is_known_by_its_distributions() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    names = {extra: {word.split(">=")[0].split("[")[0] for word in extras[extra]} for extra in EXTRAS}
    assert names == {extra: set(packages) for extra, packages in EXTRAS.items()}
    # transformers imports torchao at every start where it is installed: only who quantises pays for it; Liger's kernels
    # need Triton, which not every machine has; and trackers are a matter of taste
    trackers = [name for name in TRACKERS if name != "tensorboard"]
    of_all = ",".join(extra for extra in EXTRAS if extra not in ("quantization", "liger", *trackers))
    assert extras["all"] == [f"mindspeed_mm[{of_all}]"]
    assert extras["trackers"] == [f"mindspeed_mm[{','.join(trackers)}]"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_missing_extra_is_a_sentence_that_names_it(
    extra: str, hide: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    if extra == "quantization":
        monkeypatch.syspath_prepend(TORCHAO)
    require_extra(extra, "this")
    hide(*EXTRAS[extra].values())
    with pytest.raises(ConfigError) as caught:
        require_extra(extra, "this")
    assert str(caught.value).startswith(f"this needs {' and '.join(EXTRAS[extra])}, which ")
    assert str(caught.value).endswith(f"installed; pip install 'mindspeed_mm[{extra}]'")


def run(*more: str, **settings: Any) -> Callable[[Path], Any]:
    """Describes a run; nothing is trained."""
    backends = ("fsdp2",) if settings else ("ptd", "fsdp2")
    words = [*WORDS, *more]
    return lambda _: describe(words, replace(OWN, backends=backends, **settings))


def rows_with(kind: str) -> Callable[[Path], None]:
    """Looks through rows, the third of which has a medium."""
    media = [(), (MediaRef("image", "a.png"),), (MediaRef(kind, "a.bin"),)]  # type: ignore[arg-type]
    source = SimpleNamespace(
        has=lambda row: row < 3, read=lambda row: SimpleNamespace(media=media[row]), where="row {}".format
    )
    return lambda _: require_media_packages(source)


def open_clip(_: Path) -> None:
    with open_container(SimpleNamespace(label="clip.mp4"), "video", 1.0):  # type: ignore[arg-type]
        pass


#: what is done → the module that is missing, the extra, words of the sentence
DOORS: dict[str, tuple[Callable[[Path], Any], str, str, str]] = {
    "a run on the Megatron backend": (run(), "megatron.core", "megatron", "without --use-torch-fsdp2"),
    "a generation run": (
        *(run("--mm-model", __file__, "--mm-data", __file__, model_schema="generation", data_schema="generation"),),
        *("diffusers", "generation", "makes images or videos"),
    ),
    "tensorboard": (run("--use-torch-fsdp2", "--tensorboard-dir", "x"), *("tensorboard",) * 2, "--tensorboard-dir"),
    "a tracker": (run("--use-torch-fsdp2", "--report-to", "wandb"), *("wandb",) * 2, "--report-to wandb"),
    "a published tracker": (run("--use-torch-fsdp2", "--wandb-project", "p"), *("wandb",) * 2, "--wandb-project"),
    "rows with videos": (rows_with("video"), "av", "video", "row 2: a video needs av"),
    "rows with sounds": (rows_with("audio"), "av", "audio", "row 2: a sound needs av"),
    "a video that is opened": (open_clip, "av", "video", "clip.mp4"),
    "a video that was made": (lambda folder: read_frames(folder / "x.mp4"), "av", "video", "x.mp4"),
    "a parquet file": (lambda folder: ParquetFile(str(folder / "x.parquet")), "pyarrow", "tables", "a parquet file"),
    "cleaned captions": (lambda _: captions.clean("a", ("basic_clean",)), "ftfy", "generation", "basic_clean"),
    "features": (lambda _: command.extract_features(SimpleNamespace()), "diffusers", "generation", "extraction"),  # type: ignore[arg-type]
    "samples": (lambda _: inference.main(["--load", str(ROOT)]), "diffusers", "generation", "makes images or videos"),
}


@pytest.mark.parametrize("door", DOORS)
def test_what_needs_a_missing_extra_is_refused_before_it_begins(
    door: str, tmp_path: Path, hide: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, module, extra, words = DOORS[door]
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    captions._ftfy.cache_clear()
    hide(module)
    with pytest.raises(ConfigError) as caught:
        begin(tmp_path)
    assert words in str(caught.value) and f"pip install 'mindspeed_mm[{extra}]'" in str(caught.value)


def test_rows_without_such_media_are_not_refused(hide: Callable[..., None]) -> None:
    hide("av")
    rows_with("image")(Path())


def test_mm_convert_says_it_too(hide: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    hide("jsonargparse")
    assert convert.main(["info", "x"]) == 1
    said = capsys.readouterr().err
    assert (
        said
        == "ConfigError: mm-convert needs jsonargparse, which isn't installed; pip install 'mindspeed_mm[convert]'\n"
    )


def test_a_processor_is_not_loaded_without_torchvision(tmp_path: Path, hide: Callable[..., None]) -> None:
    """transformers would fall back to another resampling of pictures, without a word."""
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "Qwen2VLImageProcessor"}))
    importlib.import_module("transformers")  # its first import looks for packages, and this finder raises
    hide("torchvision")
    with pytest.raises(ConfigError, match="needs torchvision, which isn't installed"):
        DefaultAdapter().load_processor(str(tmp_path), PreprocessParameters(model_name_or_path=str(tmp_path)))


@pytest.mark.parametrize(
    "error, sentence",
    [
        (
            ImportError(TORCHVISION),
            "Qwen2VLVideoProcessor needs Torchvision, which isn't installed; pip install torchvision",
        ),
        (
            ImportError("\nTimmModel requires the timm library but it was not found in your environment. You can"),
            "TimmModel needs timm, which isn't installed; pip install timm",
        ),
        (
            ImportError("\nX requires the librosa library. But that was not found in your environment. You can"),
            "X needs librosa, which isn't installed; pip install librosa",
        ),
        (
            ImportError("\nX requires the mistral-common library but it was not found in your environment. You can"),
            "X needs mistral-common, which isn't installed; pip install mistral-common",
        ),
        (ImportError("cannot import name 'x' from 'y'"), None),
        (ValueError(TORCHVISION), None),
    ],
)
def test_a_package_that_transformers_lacks_is_a_sentence(error: Exception, sentence: str | None) -> None:
    assert missing_library(error) == sentence


def test_an_entry_script_tells_it_as_its_own_error() -> None:
    with pytest.raises(ConfigError, match=r"^Qwen2VLVideoProcessor needs Torchvision"), missing_library_as_sentence():
        raise ImportError(TORCHVISION)
    with pytest.raises(ImportError, match="of a user's own"), missing_library_as_sentence():
        raise ImportError("of a user's own")


def test_data_check_goes_on_without_plots(hide: Callable[..., None]) -> None:
    hide("matplotlib")
    assert not is_installed("matplotlib") and not data_check.has_extra("plots")
