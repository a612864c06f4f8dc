"""Which stage holds what."""

from __future__ import annotations

import pytest

from mindspeed_mm.parallel.pipeline import Stage, needs_variable_shapes, plan_stages
from mindspeed_mm.utils.errors import ConfigError


def layers(stages: list[Stage]) -> tuple[list[list[int]], list[list[int]]]:
    return [list(s.vision_layers) for s in stages], [list(s.text_layers) for s in stages]


def test_one_stage_holds_everything() -> None:
    (stage,) = plan_stages(1, None, text_layers=3, vision_layers=2)
    assert stage == Stage(range(2), True, True, range(3), True, True)
    assert stage.has_vision and stage.has_text


def test_without_lists_vision_is_first_and_language_layers_are_even() -> None:
    stages = plan_stages(4, None, text_layers=6, vision_layers=3)
    assert layers(stages) == ([[0, 1, 2], [], [], []], [[0, 1], [2, 3], [4], [5]])
    assert [s.has_patch_embedding for s in stages] == [True, False, False, False]
    assert [s.has_projector for s in stages] == [True, False, False, False]
    assert [s.has_embedding for s in stages] == [True, False, False, False]
    assert [s.has_head for s in stages] == [False, False, False, True]
    assert not needs_variable_shapes(stages)


def test_published_lists() -> None:
    stages = plan_stages(
        4,
        None,
        text_layers=28,
        vision_layers=32,
        text=[[1, 10, 10, 7]],
        vision=[[32, 0, 0, 0]],
        projector=[[1, 0, 0, 0]],
    )
    assert [len(s.text_layers) for s in stages] == [1, 10, 10, 7]
    assert stages[1].text_layers == range(1, 11)
    assert [len(s.vision_layers) for s in stages] == [32, 0, 0, 0]


def test_virtual_stages_run_through_all_ranks_before_the_next_chunk() -> None:
    stages = plan_stages(2, 2, text_layers=5, text=[[1, 2], [0, 2]])
    assert layers(stages)[1] == [[0], [1, 2], [], [3, 4]]
    assert stages[3].has_head and not stages[2].has_head


def test_a_tower_over_several_stages() -> None:
    stages = plan_stages(3, None, text_layers=2, vision_layers=4, text=[[0, 1, 1]], vision=[[3, 1, 0]])
    assert layers(stages) == ([[0, 1, 2], [3], []], [[], [0], [1]])
    assert stages[0].has_patch_embedding and not stages[1].has_patch_embedding
    assert stages[1].has_projector and stages[1].has_embedding
    assert needs_variable_shapes(stages)


def test_a_projector_that_waits_for_the_language_model() -> None:
    stages = plan_stages(
        3, None, text_layers=2, vision_layers=1, text=[[0, 0, 2]], vision=[[1, 0, 0]], projector=[[0, 0, 1]]
    )
    assert stages[2].has_projector and stages[2].has_embedding and stages[2].has_head
    assert not stages[1].has_vision and not stages[1].has_text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"text": [[1, 1]]}, r"adds up to 2; the model has 4"),
        ({"text": [[4]]}, r"1 × 1 numbers; expected one list of 2"),
        ({"text": [[1, 1], [1, 1]]}, r"2 × 2 numbers; expected one list of 2"),
        ({"text": [[4, 0]], "vision": [[0, 3]]}, r"ends on stage 1, its projector is on stage 1.* begin on stage 0"),
        ({"text": [[4, 0]], "projector": [[0, 1]]}, r"its projector is on stage 1"),
        ({"text_layers": 1}, r"2 pipeline stages .* for 1 language layers"),
    ],
)
def test_what_does_not_fit_is_refused(changes: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plan_stages(2, None, **{"text_layers": 4, "vision_layers": 3, **changes})
