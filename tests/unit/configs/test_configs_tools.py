"""tools.json."""

from __future__ import annotations

from typing import Any

import pytest

from mindspeed_mm.configs.tools_config import ProfilerFile, ToolsConfig
from mindspeed_mm.utils.errors import ConfigError


@pytest.mark.parametrize("content", [None, {}, {"profile": {}}, {"profile": {"enable": "False"}}])
def test_nothing_is_on_by_default(content: Any) -> None:
    config = ToolsConfig.from_dict(content)
    assert not config.profile.enable and not config.memory_profile.enable
    assert (config.profile.static_param.start_step, config.profile.static_param.end_step) == (10, 11)
    assert (config.profile.ranks, config.memory_profile.dump_ranks) == ([0, 1, 2, 3], [0])


def test_an_enabled_profiler() -> None:
    config = ToolsConfig.from_dict(
        {
            "profile": {
                "enable": True,
                "ranks": -1,
                "static_param": {"start_step": "1", "end_step": 3, "level": "level0"},
            },
            "memory_profile": {"enable": 1, "end_step": 5, "max_entries": None},
        }
    )
    assert config.profile.ranks == [-1] and config.profile.static_param.start_step == 1
    assert config.memory_profile.enable and config.memory_profile.max_entries is None


@pytest.mark.parametrize(
    "content, parts",
    [
        ({"profil": {}}, ["unknown key 'profil'", "'profile'"]),
        ({"profile": {"static_param": {"star_step": 1}}}, ["'profile.static_param.star_step'", "'start_step'"]),
        ({"profile": {"start_step": 1}}, ["'profile.start_step'", "belongs at 'profile.static_param.start_step'"]),
        ({"profile": {"enable": "x"}}, ["'profile.enable' is 'x'", "true or false"]),
        ({"profile": {"static_param": {"level": "level3"}}}, ["'level3'", "level0, level1, level2"]),
        ({"profile": {"profile_type": "live"}}, ["'profile.profile_type' is 'live'", "static, dynamic"]),
        (
            {"profile": {"enable": True, "static_param": {"start_step": 3, "end_step": 3}}},
            ["'static_param.end_step' 3", "greater than"],
        ),
        ({"memory_profile": {"enable": True, "start_step": 2}}, ["memory_profile", "'end_step' 2", "greater"]),
        ({"memory_profile": {"dump_ranks": ["a"]}}, ["'memory_profile.dump_ranks[0]' is 'a'", "a whole number"]),
        ([], ["expected an object"]),
    ],
)
def test_mistakes(content: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        ToolsConfig.from_dict(content, file="my/tools.json")
    for part in ["my/tools.json", *parts]:
        assert part in str(caught.value)


def test_feature_extraction_is_said(said: list[str]) -> None:
    ToolsConfig.from_dict({"sorafeature": {"save_path": "x"}})
    assert len(said) == 1 and "sorafeature.save_path" in said[0]


def test_keys_of_profiler_config_json_without_effect_are_said(said: list[str]) -> None:
    ProfilerFile.from_dict({"analyse": False}, "profiler_config.json")
    assert said == []
    ProfilerFile.from_dict({"analyse": True, "experimental_config": {"l2_cache": True}}, "profiler_config.json")
    assert "analyse" in said[0] and any("experimental_config" in line for line in said)
