"""Features of pictures and videos by a vision model of transformers, and CLIP scores of samples."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mindspeed_mm import accelerator
from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.hf_directory import describe_missing_model
from mindspeed_mm.tasks.generation.outputs import SAMPLES, read_frames
from mindspeed_mm.utils.errors import CheckpointError, DataError

if TYPE_CHECKING:
    from transformers.utils import ModelOutput

_ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".mp4")


class VisionModel:
    """A vision model, or one of vision and text (CLIP, SigLIP), with its processor.

    Attributes:
        model: the model of transformers, in float32 on the device.
    """

    def __init__(self, directory: str | Path, *, with_text: bool = False) -> None:
        """
        Args:
            directory: directory of the model.
            with_text: whether texts are embedded as well.

        Raises:
            CheckpointError: it can't be loaded, or embeds no text.
        """
        import transformers

        path = str(directory)
        if not Path(path).is_dir():
            raise CheckpointError(f"vision model: {describe_missing_model(path)}")
        try:
            self.model = transformers.AutoModel.from_pretrained(path, dtype=torch.float32).eval()
            self._processor = transformers.AutoImageProcessor.from_pretrained(path)
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(path) if with_text else None
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise CheckpointError(f"vision model '{path}' can't be loaded: {error}") from error
        if with_text and not hasattr(self.model, "get_text_features"):
            raise CheckpointError(
                f"'{path}' holds a {type(self.model).__name__}, which embeds no text; expected a CLIP"
            )
        self._device = accelerator.current().device()
        self.model.to(self._device)

    @torch.no_grad()
    def pictures(self, frames: Sequence[np.ndarray]) -> torch.Tensor:
        """Embed pictures, each [height, width, 3] uint8: [pictures, features] float32 on the host.

        For CLIP and similar models the projected embedding; else the pooled output, or the first token's state.
        """
        inputs = self._processor(images=list(frames), return_tensors="pt").to(self._device)
        if hasattr(self.model, "get_image_features"):
            return _pooled(self.model.get_image_features(pixel_values=inputs["pixel_values"])).cpu()
        return _pooled(self.model(pixel_values=inputs["pixel_values"])).cpu()

    @torch.no_grad()
    def texts(self, texts: Sequence[str]) -> torch.Tensor:
        """Embed texts: [texts, features] float32 on the host."""
        assert self._tokenizer is not None
        length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        inputs = self._tokenizer(
            list(texts),
            padding="max_length" if self._pads else True,
            truncation=True,
            max_length=length,
            return_tensors="pt",
        ).to(self._device)
        return _pooled(self.model.get_text_features(**inputs)).cpu()

    @property
    def _pads(self) -> bool:
        """Whether texts are padded to the full length: SigLIP was trained so, and has no mask."""
        return "siglip" in str(self.model.config.model_type)


def _pooled(output: torch.Tensor | ModelOutput) -> torch.Tensor:
    if isinstance(output, torch.Tensor):
        return output.float()
    pooled = getattr(output, "pooler_output", None)
    return (pooled if pooled is not None else output.last_hidden_state[:, 0]).float()


def media_features(model: VisionModel, paths: Sequence[Path], *, frames: int = 8) -> torch.Tensor:
    """Return features of files: [files, features] float32; for a video the mean over evenly spaced frames.

    Raises:
        DataError: a file can't be read.
    """
    return torch.stack([model.pictures(_frames(path, frames)).mean(0) for path in paths])


def list_media(place: str | Path) -> list[Path]:
    """List pictures and videos: those in a folder's samples.jsonl, else all in the folder; or the lines of a text file.

    Raises:
        DataError: there are none.
    """
    path = Path(place)
    if path.is_dir() and (path / SAMPLES).is_file():
        found = [path / record["file"] for record in read_samples(path)]
    elif path.is_dir():
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in _ENDINGS and not _hidden(file, path))
    elif path.is_file():
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        found = [Path(line) if Path(line).is_file() else path.parent / line for line in lines]
    else:
        raise DataError(f"media: {describe_missing(place)}")
    if not found:
        raise DataError(f"'{path}' holds no pictures or videos; expected files that end in {', '.join(_ENDINGS)}")
    return found


def read_samples(folder: Path) -> list[dict[str, Any]]:
    """Read samples.jsonl of a folder.

    Raises:
        DataError: it doesn't exist, or a line isn't a sample.
    """
    path = folder / SAMPLES
    if not path.is_file():
        raise DataError(f"'{folder}' has no {SAMPLES}; expected a folder that inference_sora.py has written")
    records = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines()):
        try:
            record = json.loads(line)
            records.append({**record, "file": str(record["file"]), "prompt": str(record["prompt"])})
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"'{path}', line {number + 1}: expected an object with file and prompt ({error})"
            ) from error
    if not records:
        raise DataError(f"'{path}' names no samples")
    return records


def clip_scores(model: VisionModel, folder: Path, *, frames: int = 8) -> list[dict[str, Any]]:
    """Compute the CLIP scores of samples and prompts: 100 · cosine of the embeddings (Hessel et al. 2021, without its
    factor and without cutting off below 0); for a video the mean over evenly spaced frames.

    Returns:
        `file`, `prompt` and `clip_score` of each line of samples.jsonl.
    """
    records = read_samples(folder)
    scores = []
    for record in records:
        of_frames = _unit(model.pictures(_frames(folder / record["file"], frames)))
        of_text = _unit(model.texts([record["prompt"]]))[0]
        score = 100 * float((of_frames.double() @ of_text.double()).mean())
        scores.append({"file": record["file"], "prompt": record["prompt"], "clip_score": score})
    return scores


def _unit(values: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(values, dim=-1)


def _frames(path: Path, count: int) -> list[np.ndarray]:
    shares = [0.5] if count == 1 else [number / (count - 1) for number in range(count)]
    try:
        return read_frames(path, shares if path.suffix.lower() == ".mp4" else None)
    except (OSError, ValueError, IndexError) as error:  # PyAV's errors are OSErrors or ValueErrors
        raise DataError(f"'{path}' can't be read: {error or type(error).__name__}") from error


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in file.relative_to(root).parts) or file.name == "contact_sheet.png"
