"""Launches of published scripts that train language models: their flags, files and variables, value by value.

`published_launches.json` holds them: a part of a launch (`environment`, `flags`, `run`, `model`, `data`, `fsdp2`) as
dotted keys, as those of another launch (`like`) without some keys and with others (`but`). `{hf}`, `{rows}` … stand in
the place of paths. `run` is what the YAML file of a run says beside model and data.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

Values = dict[str, Any]
_PARTS = ("environment", "flags", "run", "model", "data", "fsdp2")


@dataclass
class Launch:
    """A launch; the parts hold dotted keys, and may be changed.

    Attributes:
        entry: the entry script.
        processes: how many it starts.
        run: None where flags and files are apart.
        fsdp2: None without an fsdp2.yaml.
    """

    entry: str
    processes: int
    environment: dict[str, str]
    flags: Values
    model: Values
    data: Values
    run: Values | None = None
    fsdp2: Values | None = field(default=None)

    def arguments(self) -> Values:
        """Where the flags are written, by their names: `gpt_args` of the run's file, or the command line."""
        return self.flags if self.run is None else self.run

    def key(self, flag: str) -> str:
        """The key of a flag in `arguments`."""
        return flag if self.run is None else f"gpt_args.{flag}"

    def write(self, folder: Path, /, **paths: Path | str) -> list[str]:
        """Write the files into a folder; returns the words after the entry script's name.

        Args:
            paths: what stands in the place of `{hf}`, `{rows}`, `{folder}`, `{cache}`, `{save}`, `{vae}` …
        """
        folder.mkdir(parents=True, exist_ok=True)
        known = {name: str(path) for name, path in paths.items()}
        known |= {name: str(folder / f"{name}.json") for name in ("model", "data")}
        known |= {"fsdp2": str(folder / "fsdp2.yaml"), "tool": "./mindspeed_mm/tools/tools.json"}
        put = functools.partial(_placed, known)
        if self.fsdp2 is not None:
            Path(known["fsdp2"]).write_text(yaml.safe_dump(nested(put(self.fsdp2))))
        words = []
        for name, value in put(self.flags).items():
            values = value if isinstance(value, list) else [value]
            words += ["--" + name.replace("_", "-"), *([] if value is True else map(str, values))]
        if self.run is None:
            for name in ("model", "data"):
                Path(known[name]).write_text(json.dumps(nested(put(getattr(self, name)))))
            return words
        content = {**nested(put(self.run)), "model": nested(put(self.model)), "data": nested(put(self.data))}
        (folder / "run.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
        return [str(folder / "run.yaml"), *words]


def _placed(paths: Mapping[str, str], values: Any) -> Any:
    if isinstance(values, dict):
        return {key: _placed(paths, value) for key, value in values.items()}
    if isinstance(values, list):
        return [_placed(paths, value) for value in values]
    if isinstance(values, str) and values.startswith("{"):
        return paths[values.strip("{}")]
    return values


def nested(values: Mapping[str, Any]) -> Values:
    """Dotted keys as objects in objects."""
    content: Values = {}
    for path, value in values.items():
        *parents, last = path.split(".")
        place = content
        for name in parents:
            place = place.setdefault(name, {})
        place[last] = value
    return content


@functools.cache
def _read() -> dict[str, Any]:
    launches: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text())
    return launches


def names() -> list[str]:
    """Of all launches."""
    return list(_read())


def launch(name: str) -> Launch:
    """A launch as it was published, but for paths."""
    described = _read()[name]
    parts = {part: _values(name, part) for part in _PARTS if part in described}
    return Launch(described["entry"], described["processes"], **parts)


def _values(name: str, part: str) -> Values:
    described = _read()[name][part]
    values = _values(described["like"], part) if "like" in described else {}
    without = described.get("without", [])
    return {key: value for key, value in values.items() if key not in without} | described.get("but", {})
