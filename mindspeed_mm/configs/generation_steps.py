"""Steps of `train_pipeline`: what each is called, which parameters it takes, and one form for all spellings of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_mm.configs.scalars import is_null_word, read_bool, read_float, read_int, show
from mindspeed_mm.utils.errors import did_you_mean

_MODES = ("resize", "shortside", "longside")
_INTERPOLATIONS = ("nearest", "bilinear", "bicubic")


def _one_of(*names: str) -> Callable[[Any], str]:
    def read(value: object) -> str:
        name = value.strip().lower() if isinstance(value, str) else value
        if name not in names:
            near = did_you_mean(name, names) if isinstance(name, str) else ""
            raise ValueError(f"expected one of {', '.join(names)}{near}")
        return name

    return read


def _read_size(value: object) -> list[int] | int | None:
    """[height, width], one number for the shorter side; None: the bucket's size."""
    if value == "auto":
        return None
    if isinstance(value, Mapping):
        unknown = sorted(value.keys() - {"max_height", "max_width"})
        if unknown or len(value) != 2:
            raise ValueError("expected max_height and max_width")
        value = [value["max_height"], value["max_width"]]
    if isinstance(value, (list, tuple)):
        sides = [read_int(side) for side in value]
        if len(sides) == 2 and min(sides) > 0:
            return sides
    elif not isinstance(value, str) and read_int(value) > 0:
        return read_int(value)
    raise ValueError('expected "auto", [height, width] or {"max_height": …, "max_width": …}')


def _read_colour(value: object) -> list[float]:
    """One number, or one for each of red, green and blue."""
    values = [read_float(item) for item in (value if isinstance(value, (list, tuple)) else [value])]
    if len(values) not in (1, 3):
        raise ValueError("expected one number, or three for red, green and blue")
    return values


def _read_std(value: object) -> list[float]:
    values = _read_colour(value)
    if min(values) <= 0:
        raise ValueError("expected numbers above 0")
    return values


def _read_off(value: object) -> bool:
    if read_bool(value):
        raise ValueError("expected false: pixels are areas here, and their corners aren't aligned")
    return False


#: parameter as written → (its one name, how it is read)
_SIZED: Mapping[str, tuple[str, Callable[[Any], Any]]] = {
    "transform_size": ("size", _read_size),
    "size": ("size", _read_size),
    "interpolation_mode": ("interpolation", _one_of(*_INTERPOLATIONS)),
    "interpolation": ("interpolation", _one_of(*_INTERPOLATIONS)),
    "antialias": ("antialias", read_bool),
    "align_corners": ("align_corners", _read_off),
}
_STEPS: Mapping[str, Mapping[str, tuple[str, Callable[[Any], Any]]]] = {
    "ResizeVideo": {**_SIZED, "mode": ("mode", _one_of(*_MODES))},
    "Resize": {**_SIZED, "mode": ("mode", _one_of(*_MODES))},
    "CenterCropResizeVideo": {
        **_SIZED,
        "top_crop": ("top_crop", read_bool),
        "use_short_edge": ("use_short_edge", read_bool),
    },
    "ResizeCropVideo": _SIZED,
    "ResizeToFill": _SIZED,
    "CenterCrop": {name: _SIZED[name] for name in ("transform_size", "size")},
    "Pad2Square": {"mean": ("mean", _read_colour)},
    "ToTensorVideo": {},
    "ToTensor": {},
    "norm_fun": {"mean": ("mean", _read_colour), "std": ("std", _read_std), "inplace": ("inplace", read_bool)},
}
#: steps after which every picture has the size that they name
_FIXING = ("CenterCropResizeVideo", "ResizeCropVideo", "ResizeToFill", "CenterCrop")


def read_steps(value: object) -> list[dict[str, Any]] | None:
    """Return steps in one form: `trans_type` and its parameters, each by one name; null parameters are left out.

    Raises:
        ValueError: what is wrong with which step.
    """
    if value is None:
        return None
    if not isinstance(value, list):
        raise ValueError('expected a list of {"trans_type": …, "param": {…}}')
    return [_read_step(step, number) for number, step in enumerate(value)]


def _read_step(step: object, number: int) -> dict[str, Any]:
    name = step.get("trans_type") if isinstance(step, Mapping) else None
    if not isinstance(step, Mapping) or not isinstance(name, str) or name not in _STEPS:
        near = did_you_mean(name, _STEPS) if isinstance(name, str) else ""
        raise ValueError(f"step {number}: 'trans_type' is {show(name)}; expected one of {', '.join(_STEPS)}{near}")
    if unknown := sorted(step.keys() - {"trans_type", "param"}):
        near = did_you_mean(unknown[0], ("trans_type", "param"))
        raise ValueError(f"step {number} ({name}): unknown key '{unknown[0]}'{near}")
    known, made = _STEPS[name], {"trans_type": name}
    param = {} if step.get("param") is None else step["param"]
    if not isinstance(param, Mapping):
        raise ValueError(f"step {number} ({name}): 'param' is {show(param)}; expected an object")
    for key, found in param.items():
        if key not in known:
            near = did_you_mean(key, known) or (f"; it takes {', '.join(known)}" if known else "; it takes none")
            raise ValueError(f"step {number} ({name}): unknown parameter '{key}'{near}")
        if found is None or is_null_word(found):
            continue
        to, read = known[key]
        try:
            made[to] = read(found)
        except ValueError as error:
            raise ValueError(f"step {number} ({name}): '{key}' is {show(found)}; {error}") from None
    return made


def fixed_size(steps: list[dict[str, Any]] | None) -> tuple[int, int] | None:
    """Return the height and width that the last sizing step names; None: it takes the bucket's."""
    for step in reversed(steps or []):
        size, name = step.get("size"), step["trans_type"]
        if name in _FIXING or (name in ("ResizeVideo", "Resize") and step.get("mode", "resize") == "resize"):
            return (size[0], size[1]) if isinstance(size, list) else None
    return None
