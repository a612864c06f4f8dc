"""Files of samples: pictures and videos, written atomically, and the record of each."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.files import replace_file, working_file

if TYPE_CHECKING:
    from PIL import Image

_RECORDS = ".samples"
SAMPLES = "samples.jsonl"
# keys of a record that may differ between two runs with the same samples
_OF_THE_RUN = ("seconds",)


def file_name(index: int, sample: int, frames: int) -> str:
    """`sample_00012_0.png` (one frame) or `.mp4` of prompt 12, sample 0."""
    return f"sample_{index:05d}_{sample}.{'png' if frames == 1 else 'mp4'}"


@dataclass(frozen=True)
class SampleFolder:
    """A folder of samples; several processes may write into it at a time, each its own samples.

    A sample exists when its file and, written after it, its record do.
    """

    root: Path

    def record(self, name: str) -> dict[str, Any] | None:
        """Return the record of a sample; None: it doesn't exist."""
        path = self.root / _RECORDS / f"{name}.json"
        if not path.is_file() or not (self.root / name).is_file():
            return None
        return json.loads(path.read_text(encoding="utf-8"))

    def exists(self, wanted: Mapping[str, Any]) -> bool:
        """Whether a sample exists that was generated with the settings of `wanted` (a record).

        Raises:
            ConfigError: one of its name exists, generated with other settings.
        """
        found = self.record(wanted["file"])
        if found is None:
            return False
        known = json.loads(json.dumps(dict(wanted)))  # tuples become lists
        for key, value in known.items():
            if key not in _OF_THE_RUN and found.get(key) != value:
                raise ConfigError(
                    f"'{self.root / wanted['file']}' was made with {key} {found.get(key)!r}, now it is {value!r}; add "
                    "--overwrite to make it again, or give another --save-path"
                )
        return True

    def write(self, frames: np.ndarray, record: Mapping[str, Any], fps: int) -> None:
        """Write a sample and its record.

        Args:
            frames: [frames, height, width, 3] uint8.
            record: its record; `file` is its name.
            fps: frame rate of videos.
        """
        (self.root / _RECORDS).mkdir(parents=True, exist_ok=True)
        path = self.root / record["file"]
        if path.suffix == ".png":
            save_picture(frames[0], path)
        else:
            save_video(frames, path, fps)
        replace_file(self.root / _RECORDS / f"{path.name}.json", json.dumps(dict(record), ensure_ascii=False))

    def write_index(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Write samples.jsonl, a line for each existing sample, in the order of `names`; return the lines."""
        records = [record for name in names if (record := self.record(name)) is not None]
        lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
        replace_file(self.root / SAMPLES, "".join(lines))
        return records


def save_picture(picture: np.ndarray | Image.Image, path: Path) -> None:
    """Write [height, width, 3] uint8, or a PIL image, as png."""
    from PIL import Image

    image = Image.fromarray(picture) if isinstance(picture, np.ndarray) else picture
    _write_atomically(path, lambda working: image.save(working, format="png"))


def save_video(frames: np.ndarray, path: Path, fps: int) -> None:
    """Write [frames, height, width, 3] uint8 as mp4 (H.264; 4:2:0, or 4:4:4 where a side is odd)."""
    _write_atomically(path, lambda working: _encode(frames, working, fps))


def _encode(frames: np.ndarray, path: Path, fps: int) -> None:
    import av

    height, width = frames.shape[1:3]
    with av.open(str(path), "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=fps)
        stream.width, stream.height = width, height
        stream.pix_fmt = "yuv444p" if height % 2 or width % 2 else "yuv420p"
        stream.options = {"crf": "16"}
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)


def _write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    working = working_file(path)
    try:
        write(working)
        os.replace(working, path)
    except BaseException:
        working.unlink(missing_ok=True)
        raise


def read_frames(path: Path, at: Sequence[float] | None = None) -> list[np.ndarray]:
    """Read a picture or a video: [height, width, 3] uint8 of each frame.

    Args:
        at: shares of the length, 0 … 1, of the frames to return; None: all.
    """
    if path.suffix == ".mp4":
        require_extra("video", f"{path}: a video")
        import av

        with av.open(str(path)) as container:
            frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    else:
        from PIL import Image

        with Image.open(path) as image:
            frames = [np.array(image.convert("RGB"))]
    if at is None:
        return frames
    return [frames[round(share * (len(frames) - 1))] for share in at]
