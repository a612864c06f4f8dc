"""The path grammar: what it matches, in which order, and what it says when nothing matches."""

from __future__ import annotations

import pytest
from torch import nn

from mindspeed_mm.parallel.patterns import expand_patterns
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.log import forget_notices


def model() -> nn.Module:
    layers = nn.ModuleList([nn.ModuleDict({"attn": nn.Linear(2, 2), "mlp": nn.Linear(2, 2)}) for _ in range(5)])
    return nn.ModuleDict(
        {"visual": nn.Linear(2, 2), "text": nn.ModuleDict({"layers": layers, "norm": nn.LayerNorm(2)})}
    )


def paths(*patterns: str) -> list[str]:
    return list(expand_patterns(model(), patterns, where="fsdp2.yaml: sub_modules_to_wrap"))


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("visual", ["visual"]),
        ("text.layers.{*}", [f"text.layers.{i}" for i in range(5)]),
        ("text.layers.{1-3}", ["text.layers.1", "text.layers.2", "text.layers.3"]),
        ("text.layers.{4,0}", ["text.layers.4", "text.layers.0"]),
        ("text.layers.{0-1,3,3-4}", [f"text.layers.{i}" for i in (0, 1, 3, 4)]),
        ("text.layers.{0,2}.mlp", ["text.layers.0.mlp", "text.layers.2.mlp"]),
        ("text.layers.2", ["text.layers.2"]),
        ("", [""]),
    ],
)
def test_expands(pattern: str, expected: list[str]) -> None:
    assert paths(pattern) == expected


def test_order_is_kept_and_duplicates_merge() -> None:
    assert paths("text.norm", "text.layers.{3}", "text.layers.{2-3}", "text.norm") == [
        "text.norm",
        "text.layers.3",
        "text.layers.2",
    ]


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        (
            "text.layer.{*}",
            ["'text' has no 'layer'", "layers, norm", "did you mean 'text.layers.{*}'"],
        ),
        ("visul", ["the model has no 'visul'", "visual, text", "did you mean 'visual'"]),
        ("text.layers.{3-7}", ["index 5", "'text.layers' has 5 elements (0-4)"]),
        ("text.layers.{9}", ["index 9", "5 elements"]),
        ("text.norm.{*}", ["LayerNorm without numbered children"]),
        ("text.layers.{*}.mpl", ["'text.layers.0' has no 'mpl'", "attn, mlp", "'text.layers.{*}.mlp'"]),
        ("text.layers.{a}", ["{a}", "expected {*}"]),
        ("text.layers.{3-1}", ["empty range '3-1'", "write 1-3"]),
        ("text.layers.{*", ["can't be read at '{*'"]),
        ("text..layers", ["can't be read"]),
    ],
)
def test_says_what_exists(pattern: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        paths(pattern)
    message = str(caught.value)
    assert "fsdp2.yaml: sub_modules_to_wrap" in message
    for word in words:
        assert word in message


def test_all_entries_that_match_nothing_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        paths("visul", "text.norm", "text.layers.{9}", "text..layers")
    lines = str(caught.value).splitlines()
    assert ["visul" in lines[0], "{9}" in lines[1], "text..layers" in lines[2]] == [True] * 3 and len(lines) == 3
    assert all(line.startswith("fsdp2.yaml: sub_modules_to_wrap: entry '") for line in lines)


def test_a_brace_takes_those_that_have_the_rest_of_the_path() -> None:
    partly = model()
    del partly["text"]["layers"][1]["mlp"]
    found = expand_patterns(partly, ["text.layers.{*}.mlp"], where="test")
    assert list(found) == [f"text.layers.{i}.mlp" for i in (0, 2, 3, 4)]
    with pytest.raises(ConfigError, match=r"'text\.layers\.1' has no 'mlp'"):
        expand_patterns(partly, ["text.layers.{0-1}.mlp"], where="test")


def test_what_is_missing_may_be_left_out(caplog: pytest.LogCaptureFixture) -> None:
    forget_notices()
    found = expand_patterns(model(), ["text.norm", "mtp", "text.layers.{*}.mtp"], where="list", ignore_missing=True)
    assert list(found) == ["text.norm"]
    assert [line for line in caplog.text.splitlines() if "list: no effect: entry 'mtp' matches nothing" in line]
    with pytest.raises(ConfigError, match="can't be read at"):
        expand_patterns(model(), ["text.layers.{*}x"], where="list", ignore_missing=True)
    with pytest.raises(ConfigError, match=r"can't be read at '\*norm'; expected a path such as"):
        expand_patterns(model(), ["*norm"], where="list", ignore_missing=True)
