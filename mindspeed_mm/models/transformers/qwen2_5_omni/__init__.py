"""Qwen2.5-Omni's thinker."""

from __future__ import annotations

from mindspeed_mm.models.common.families import Family
from mindspeed_mm.utils.versions import require_release


def check_release() -> None:
    """Refuse a release of transformers that is too old for the Omni families.

    Raises:
        ConfigError: the installed release is too old; the message names the release that is needed.
    """
    require_release(
        "Qwen2.5-Omni and Qwen3-Omni",
        "transformers",
        "5.23",
        "their modules have today's names, and their processors say what they write for a medium, since then",
    )


FAMILY = Family(
    "transformers:Qwen2_5OmniThinkerForConditionalGeneration",
    traits=".traits:TRAITS",
    adapter=".data:ADAPTER",
    package=__name__,
    check_release=check_release,
)
