"""Booleans, numbers and dtype names as people write them."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.configs.scalars import is_null_word, read_bool, read_dtype, read_float, read_int


@pytest.mark.parametrize("value", [True, 1, "true", "True", "TRUE", "1", "on", "Yes", " true "])
def test_true(value: Any) -> None:
    assert read_bool(value) is True


@pytest.mark.parametrize("value", [False, 0, "false", "False", "0", "off", "No"])
def test_false(value: Any) -> None:
    assert read_bool(value) is False


@pytest.mark.parametrize("value", [2, -1, 1.0, "2", "maybe", "", None, [], "None"])
def test_no_boolean(value: Any) -> None:
    with pytest.raises(ValueError, match="true or false"):
        read_bool(value)


@pytest.mark.parametrize("value, number", [("1e-5", 1e-5), ("1e-08", 1e-8), ("1E5", 1e5), (3, 3.0), (".5", 0.5)])
def test_float(value: Any, number: float) -> None:
    assert read_float(value) == number and isinstance(read_float(value), float)


@pytest.mark.parametrize("value", [True, "x", "1e", "nan", "inf", float("nan"), None, "1_0", "", [1]])
def test_no_float(value: Any) -> None:
    with pytest.raises(ValueError, match="a number"):
        read_float(value)


@pytest.mark.parametrize("value, number", [(3, 3), ("3", 3), (1e4, 10000), ("-2", -2)])
def test_int(value: Any, number: int) -> None:
    assert read_int(value) == number and isinstance(read_int(value), int)


@pytest.mark.parametrize("value", [True, 1.5, "1.5", "1e4", "x", None, ""])
def test_no_int(value: Any) -> None:
    with pytest.raises(ValueError, match="a whole number"):
        read_int(value)


@pytest.mark.parametrize("value, name", [("bfloat16", "bf16"), ("torch.float32", "fp32"), ("FP16", "fp16")])
def test_dtype(value: str, name: str) -> None:
    assert read_dtype(value) == name


@pytest.mark.parametrize("value", ["bf17", 16, None, "int8"])
def test_no_dtype(value: Any) -> None:
    with pytest.raises(ValueError, match="bf16, fp16, fp32"):
        read_dtype(value)


def test_null_words() -> None:
    assert [word for word in ("None", "none", "null", "", "nil", 0, None) if is_null_word(word)] == [
        "None",
        "none",
        "null",
    ]
