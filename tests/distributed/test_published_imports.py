"""Import paths of the Megatron backend that published scripts and documents name."""

from __future__ import annotations

from tests.support.workers import RankPool
from tests.unit.test_published_imports import problems_of_classes

ON_MEGATRON = {"mindspeed_mm.models.vlm_model.VLModel": (("set_input_tensor", "forward"), ("MegatronModule",))}


def test_classes_of_the_megatron_backend(megatron_pools: dict[int, RankPool]) -> None:
    assert megatron_pools[1].run(problems_on_megatron, timeout=60) == [[]]


def problems_on_megatron() -> list[str]:
    from mindspeed_mm import accelerator

    accelerator.prepare_megatron()
    return problems_of_classes(ON_MEGATRON)
