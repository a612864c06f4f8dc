"""Published keys: every name is accepted, every one that we don't honour has a reason."""

from __future__ import annotations

import re
from typing import Any

import pytest

from mindspeed_mm.configs import data_rules, model_rules
from mindspeed_mm.configs.data_config import DataConfig
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.published import NoEffect, log_no_effect, published_paths
from mindspeed_mm.configs.sections import Section, key_paths, sort_keys
from mindspeed_mm.configs.tools_config import ToolsConfig

KINDS: list[tuple[str, type[Section]]] = [
    ("data", DataConfig),
    ("model", TransformersModelConfig),
    ("tools", ToolsConfig),
]

# A sample of the published tables, from every kind of run; `[]` is a list of objects.
SAMPLES = {
    "data": """dataloader_param.group_frame dataset_param.packed_parameters.expected_num_tokens
        dataset_param.preprocess_parameters.train_pipeline.first_frame_clip[].param.transform_size.max_height
        dataset_param.basic_parameters.vlm_sft.llava_ov.jsonl_path dataset_param.text_preprocess_methods[].method
        dataset_param.tokenizer_config[].template_file_path dataset_param.dataset_conf.prompt_conf.use_hist
        dataset_param.processor.compute_fbank.mel_hop_size train_data_set_list""",
    "model": """ae.tiling_param.tile_size diffusion.num_train_timesteps predictor.vace_dit.vace_layers mllm.use_moe
        text_encoder[].byT5_ckpt_path tokenizer[].from_pretrained generation_config.top_k dpo.loss_beta
        text_decoder.mrope_section text_decoder.moe_router_topk image_encoder.vision_encoder.fullatt_block_indexes
        vision_encoder.freeze loss_cfg.router_aux_loss_coef recompute_plan.apply_modules
        ctc_conf.ctc_type video_token_id""",
    "tools": "profile.static_param.level memory_profile.max_entries sorafeature.save_path",
}


def nested(path: str, value: Any) -> dict[str, Any]:
    for part in reversed(path.split(".")):
        value = {part.removesuffix("[]"): [value] if part.endswith("[]") else value}
    return value


@pytest.mark.parametrize("kind, cls", KINDS)
def test_published_names_are_known(kind: str, cls: type[Section]) -> None:
    for path in [*SAMPLES[kind].split(), *published_paths(kind)]:
        assert sort_keys(cls, nested(path, 1), published_paths(kind)).unknown == {}, path


@pytest.mark.parametrize("kind, cls", KINDS)
def test_a_published_name_does_not_open_the_door_for_others(kind: str, cls: type[Section]) -> None:
    for path in SAMPLES[kind].split():
        wrong = path + "x"
        assert list(sort_keys(cls, nested(wrong, 1), published_paths(kind)).unknown) == [wrong.replace("[]", "")]


@pytest.mark.parametrize("kind, rules", [("data", data_rules.IDLE_DATA_KEYS), ("model", model_rules.IDLE_MODEL_KEYS)])
def test_every_rule_is_of_use(kind: str, rules: tuple[NoEffect, ...]) -> None:
    cls = dict(KINDS)[kind]
    paths = published_paths(kind) - set(key_paths(cls))
    used = {next(rule for rule in rules if re.fullmatch(rule.pattern, path)) for path in paths}
    assert used == set(rules)


def test_notices_are_grouped_by_reason(said: list[str]) -> None:
    rules = (NoEffect(r"a\..*", "of a"), NoEffect(".*", "of the rest"))
    log_no_effect(["a.x", "b", "a.y"], rules, "f.json")
    assert said == ["f.json: no effect here: a.x, a.y: of a", "f.json: no effect here: b: of the rest"]
