"""Published launch scripts, family by family: their flags, files and variables train two steps on two processes.

What is exchanged: paths, the numbers of a model that the tiny one doesn't have, sizes of the layout, workers and steps.
"""

from __future__ import annotations

import functools
import json
import math
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from mindspeed_mm.monitor.metrics import read_metrics
from tests.support.families import families
from tests.support.launch import ROOT, WRAP, run_entry
from tests.support.tiny import tiny_qwen2_5_vl_dir, write_mixed_dataset
from tests.support.workers import RankPool
from tests.unit.configs.published_vlm import published_model

# of every script
COMMON = """--context-parallel-size 1 --context-parallel-algo ulysses_cp_algo --micro-batch-size 1 --global-batch-size 4
    --seq-length 1024 --lr 1.0e-5 --lr-decay-style cosine --lr-warmup-fraction 0.1 --min-lr 1e-7 --weight-decay 0
    --train-iters 2 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.999 --seed 42 --num-workers 0 --bf16
    --no-gradient-accumulation-fusion --no-load-optim --no-load-rng --no-save-optim --no-save-rng --use-flash-attn
    --use-fused-rmsnorm --use-fused-swiglu --swiglu --normalization RMSNorm --no-masked-softmax-fusion
    --tokenizer-type NullTokenizer --vocab-size 152064 --make-vocab-size-divisible-by 1 --use-mcore-models
    --attention-mask-type general --log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000
    --distributed-timeout-minutes 20 --distributed-backend nccl"""
MEGATRON = """--use-distributed-optimizer --variable-seq-lengths --use-cpu-initialization
    --use-multiparameter-pipeline-model-parallel --ckpt-format torch"""
FSDP2 = """--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --use-torch-fsdp2 --ckpt-format torch_dcp
    --untie-embeddings-and-output-weights --init-model-with-meta-device --downcast-to-bf16 --log-tps
    --optimizer-selection fused_torch_adamw"""
VARIABLES = {
    "ASCEND_SLOG_PRINT_TO_STDOUT": "0",
    "CPU_AFFINITY_CONF": "1",
    "HCCL_CONNECT_TIMEOUT": "1200",
    "MULTI_STREAM_MEMORY_REUSE": "2",
    "NPU_ASD_ENABLE": "0",
    "PYTORCH_NPU_ALLOC_CONF": "expandable_segments:True",
    "TASK_QUEUE_ENABLE": "2",
    "TOKENIZERS_PARALLELISM": "false",
}


def block(model_id: str, layers: int, hidden: int, heads: int, freeze: bool, **keys: Any) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return {"model_id": model_id, **sizes, "freeze": freeze, **keys}


FLASH = {"attn_implementation": "flash_attention_2", "attn_layout": "TND"}
PROJECTOR = {"model_id": "lnmlp", "num_layers": 1, "freeze": True}
QWEN2_VIT = block("qwen2vit", 32, 1280, 16, True)
# for Megatron's checks only: the HF directory says the structure
OMNI_TEXT = block("qwen2_5_omni_thinker", 28, 3584, 28, False, max_position_embeddings=9999999)
OMNI_AUDIO = {"audio_encoder": block("qwen_omni", 32, 1280, 20, True)}
TRANSFORMERS_MODELS: dict[str, dict[str, Any]] = {
    "internvl": {
        "model_id": "internvl",
        "img_context_token_id": 151671,
        "text_decoder": block("qwen3lm", 999, 999, 999, False, max_position_embeddings=9999999),
        "loss_cfg": {"loss_type": "per_sample_loss", "compute_mode": "default"},
        "patch": {"clip_grad_async": True, "scale_grad": True},
    },
    "mistral3": {
        "model_id": "mistral3",
        "image_token_index": 10,
        "vision_encoder": block("pixtral", 24, 1024, 16, True),
        "vision_projector": {"freeze": True},
        "text_decoder": block("mistral", 40, 5120, 32, False, attn_implementation="sdpa", activation_offload=False),
    },
    "glm4v_moe": {
        "model_id": "glm4v_moe",
        "image_encoder": {
            "vision_encoder": block("glm4v_moe", 24, 1536, 12, True, **FLASH),
            "vision_projector": PROJECTOR,
        },
        "text_decoder": block("glm_4v_moe_text", 46, 12288, 96, False, use_npu_fused_moe=True, **FLASH),
        "loss_cfg": {"loss_type": "per_token_loss", "compute_mode": "dynamic_chunk", "chunk_size": 4096},
    },
    "qwen2_5_omni": {
        "image_encoder": {"vision_encoder": {**QWEN2_VIT, "freeze": True}, "vision_projector": PROJECTOR},
        "audio_encoder": {**OMNI_AUDIO, "tp": 1, "pp": 1, "cp": 1},
        "text_decoder": {**OMNI_TEXT, "pipeline_num_layers": [11, 17]},
    },
    "qwen3_omni_moe": {
        "model_id": "qwen3_omni_moe",
        "image_encoder": {"vision_encoder": QWEN2_VIT, "vision_projector": PROJECTOR},
        "audio_encoder": OMNI_AUDIO,
        "text_decoder": OMNI_TEXT,
    },
    "qwen3_vl": {
        "model_id": "qwen3_vl",
        "image_encoder": {
            "vision_encoder": block("qwen3vit", 27, 1152, 16, True, synchronize_per_layer=True, **FLASH),
            "vision_projector": PROJECTOR,
        },
        "text_decoder": block("qwen3lm", 36, 4096, 32, False, is_causal=False, max_position_embeddings=262144, **FLASH),
        "loss_cfg": {
            "compute_mode": "default",
            "chunk_size": 1024,
            "loss_type": "default",
            "router_aux_loss_coef": 0.0,
        },
        "patch": {"clip_grad_async": True, "bridge_patch": False},
    },
}
TRANSFORMERS_MODELS["qwen3_vl_moe"] = {
    **TRANSFORMERS_MODELS["qwen3_vl"],
    "model_id": "qwen3_vl_moe",
    "text_decoder": block("qwen3lm", 48, 2048, 32, False, use_npu_fused_moe=True, activation_offload=False),
}


@dataclass(frozen=True)
class Script:
    """One published script.

    Attributes:
        family: of the model: one of tests/support/families, or "qwen2_5_vl".
        flags: its own, beside those of every script.
        template, collator: of its data.json.
        size: of Qwen2.5-VL on the Megatron road.
        entry: the entry script.
        in_yaml: it is written as one YAML file.
        preprocess: of its data.json.
    """

    family: str
    flags: str
    template: str | None = "qwen2vl"
    collator: str = "qwen2vl"
    size: str = ""
    entry: str = "pretrain_transformers.py"
    in_yaml: bool = False
    preprocess: Mapping[str, Any] = field(default_factory=dict)
    full: bool = False


PTD = functools.partial(Script, "qwen2_5_vl", entry="pretrain_vlm.py")
TP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 1 --sequence-parallel"
PP2 = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 2"
DP2 = "--tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 --overlap-grad-reduce --overlap-param-gather"
BLOCK = "--recompute-granularity full --recompute-method block --recompute-num-layers 12"
OMNI = {"audio_sampling_rate": 16000, "use_audio_in_video": False}
SCRIPTS: dict[str, Script] = {
    "qwen2.5vl 7B": PTD(f"{PP2} {MEGATRON}", size="7b"),
    "qwen2.5vl 72B FSDP2": Script("qwen2_5_vl", FSDP2, entry="pretrain_vlm.py"),
    "qwen3vl 8B": Script("qwen3_vl", "", "qwen3_vl_nothink", "qwen3vl", in_yaml=True),
    "internvl3.5 30B": Script("internvl", FSDP2, None, "internvl", full=True),
    "magistral 2509": Script("mistral3", FSDP2, "mistral", preprocess={"fix_mistral_regex": True}, full=True),
    "qwen3omni 30B": Script("qwen3_omni_moe", FSDP2, "qwen3_omni", "qwen3omni", preprocess=OMNI),
    "qwen2.5vl 3B": PTD(f"{DP2} {MEGATRON} --virtual-pipeline-model-parallel-size 1", size="3b", full=True),
    "qwen2.5vl 32B": PTD(f"{TP2} {MEGATRON}", size="32b", full=True),
    "qwen2.5vl 72B": PTD(f"{PP2} {MEGATRON} {BLOCK}", size="72b", full=True),
    "qwen3vl 30B-A3B": Script("qwen3_vl_moe", "", "qwen3_vl_nothink", "qwen3vl", in_yaml=True, full=True),
    "glm4.5v 106B": Script("glm4v_moe", FSDP2, "glm4v_moe", "glm4v_moe", full=True),
    "qwen2.5omni 7B": Script("qwen2_5_omni", FSDP2, "qwen2_omni", entry="pretrain_vlm.py", preprocess=OMNI, full=True),
}


@functools.cache
def workspace() -> Path:
    return Path(tempfile.mkdtemp(prefix="published-scripts-"))


@functools.cache
def directory_of(family: str) -> Path:
    """A tiny directory of the family; layers and heads enough for two stages or two tensor-parallel ranks."""
    path = workspace() / family
    path.mkdir()
    return tiny_qwen2_5_vl_dir(path, deep=True) if family == "qwen2_5_vl" else families()[family].make(path)


@functools.cache
def rows() -> Path:
    return write_mixed_dataset(workspace() / "data", rows=8, seed=1)


def data_json(script: Script) -> dict[str, Any]:
    """Published keys and values; InternVL's is a list of jsonl files."""
    hf_dir, file = str(directory_of(script.family)), rows()
    attr = {"messages": "messages", "role_tag": "role", "content_tag": "content", "user_tag": "user"}
    attr |= {"assistant_tag": "assistant", "images": "images", "videos": None, "audios": None, "system": None}
    attr |= {"observation_tag": None, "function_tag": None, "system_tag": None}
    loader = {"dataloader_mode": "sampler", "sampler_type": "BaseRandomBatchSampler", "shuffle": True}
    loader |= {"drop_last": True, "pin_memory": True}
    collate = {"model_name": script.collator, "ignore_pad_token_for_loss": True}
    if script.family == "internvl":
        param = {
            "dataset_type": "multimodal",
            "basic_parameters": {"data_path": str(file), "data_folder": str(file.parent), "repeat_time": 1},
            "preprocess_parameters": {"image_reader_type": "Image"},
            "tokenizer_config": {"hub_backend": "hf", "autotokenizer_name": "AutoTokenizer", "from_pretrained": hf_dir},
            "attr": attr,
            "template_name": "internvl2_5",
            "image_size": 32,
            "dynamic_image_size": True,
            "sampling_method": "rand",
        }
        return {"dataset_param": param, "dataloader_param": {**loader, "collate_param": {**collate, "pad_id": 2}}}
    basic = {"template": script.template, "dataset_dir": str(file.parent), "dataset": str(file), "tool_format": None}
    basic |= {"cache_dir": str(workspace() / "cache"), "train_on_prompt": False, "mask_history": False}
    basic |= {"preprocessing_batch_size": 1000, "preprocessing_num_workers": 16, "max_samples": None}
    preprocess = {"model_name_or_path": hf_dir, "use_fast_tokenizer": True, "split_special_tokens": False}
    preprocess |= {"image_max_pixels": 262144, "image_min_pixels": 1024, "video_max_pixels": 16384}
    preprocess |= {"video_min_pixels": 0, "video_fps": 2.0, "video_maxlen": 64, **script.preprocess}
    param = {
        "dataset_type": "huggingface",
        "basic_parameters": basic,
        "preprocess_parameters": preprocess,
        "attr": attr,
    }
    return {"dataset_param": param, "dataloader_param": {**loader, "collate_param": collate}}


def model_json(script: Script) -> dict[str, Any]:
    hf_dir = directory_of(script.family)
    if not script.size:
        return {"init_from_hf_path": str(hf_dir), **TRANSFORMERS_MODELS.get(script.family, {})}
    content = published_model(script.size, init_from_hf_path=str(hf_dir))
    config = json.loads((hf_dir / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    stages = 2 if "--pipeline-model-parallel-size 2" in script.flags else 1
    content["img_context_token_id"], content["vision_start_token_id"] = (
        config["image_token_id"],
        config["vision_start_token_id"],
    )
    content["text_decoder"] |= {
        "num_layers": text["num_hidden_layers"],
        "pipeline_num_layers": {1: [4], 2: [1, 3]}[stages],
        "hidden_size": text["hidden_size"],
        "ffn_hidden_size": text["intermediate_size"],
        "num_attention_heads": text["num_attention_heads"],
        "num_query_groups": text["num_key_value_heads"],
        "vocab_size": text["vocab_size"],
        "layernorm_epsilon": text["rms_norm_eps"],
        "mrope_section": text["rope_parameters"]["mrope_section"],
        "untie_embeddings_and_output_weights": True,
    }
    content["image_encoder"]["vision_encoder"] |= {
        "num_layers": vision["depth"],
        "pipeline_num_layers": {1: [4], 2: [4, 0]}[stages],
        "hidden_size": vision["hidden_size"],
        "ffn_hidden_size": vision["intermediate_size"],
        "intermediate_size": vision["intermediate_size"],
        "num_attention_heads": vision["num_heads"],
        "tokens_per_second": vision["tokens_per_second"],
        "window_attn_size": vision["window_size"],
        "fullatt_block_indexes": vision["fullatt_block_indexes"],
    }
    merged = vision["hidden_size"] * vision["spatial_merge_size"] ** 2
    content["image_encoder"]["vision_projector"] |= {
        "input_size": vision["hidden_size"],
        "ffn_hidden_size": merged,
        "hidden_size": text["hidden_size"],
    }
    return content


def fsdp2_yaml(family: str) -> dict[str, Any]:
    wrap = WRAP if family == "qwen2_5_vl" else list(families()[family].wrap)
    return {
        "sharding_size": "auto",
        "sub_modules_to_wrap": wrap,
        "recompute_modules": [path for path in wrap if "language_model" in path],
        "use_reentrant": False,
        "param_dtype": "bf16",
        "reduce_dtype": "fp32",
        "cast_forward_inputs": True,
        "reshard_after_forward": True,
        "num_to_forward_prefetch": 1,
        "num_to_backward_prefetch": 1,
        "offload_to_cpu": False,
    }


def yaml_run(script: Script, files: Mapping[str, str], save: Path) -> str:
    """The file, with false switches that the command line would not hold."""
    gpt_args: dict[str, Any] = {"fsdp2_config_path": files["fsdp2"], "load": str(save), "save": str(save)}
    flags = f"{COMMON} {FSDP2}".split()
    for number, word in enumerate(flags):
        if word.startswith("--"):
            values = flags[number + 1 : number + 2]
            name, is_switch = word[2:].replace("-", "_"), not values or values[0].startswith("--")
            gpt_args[name] = True if is_switch else yaml.safe_load(values[0])
    gpt_args |= {"expert_model_parallel_size": 1, "moe_grouped_gemm": False, "overlap_grad_reduce": False}
    content = {"MM_TOOL_PATH": files["tool"], "gpt_args": gpt_args}
    return yaml.safe_dump({**content, "model": model_json(script), "data": data_json(script)}, sort_keys=False)


def words_of(script: Script, folder: Path) -> list[str]:
    """The launch command after the entry script's name."""
    folder.mkdir()
    files = {name: str(folder / f"{name}.json") for name in ("model", "data")}
    files |= {"tool": "./mindspeed_mm/tools/tools.json", "fsdp2": str(folder / "fsdp2.yaml")}
    Path(files["fsdp2"]).write_text(yaml.safe_dump(fsdp2_yaml(script.family)))
    save = folder / "save"
    if script.in_yaml:
        (folder / "run.yaml").write_text(yaml_run(script, files, save))
        return [str(folder / "run.yaml"), "--distributed-backend", "nccl"]
    Path(files["model"]).write_text(json.dumps(model_json(script)))
    Path(files["data"]).write_text(json.dumps(data_json(script)))
    words = f"{COMMON} {script.flags} --mm-tool {files['tool']}".split()
    words += ["--mm-data", files["data"], "--mm-model", files["model"], "--load", str(save), "--save", str(save)]
    return [*words, "--fsdp2-config-path", files["fsdp2"]] if FSDP2 in script.flags else words


def launch(words: list[str], entry: str, connections: str) -> None:
    """As the script does it: from the checkout's root, with its variables."""
    before = os.getcwd()
    os.environ.update(VARIABLES, CUDA_DEVICE_MAX_CONNECTIONS=connections)
    os.chdir(ROOT)
    try:
        run_entry(words, entry)
    finally:
        os.chdir(before)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if script.full else []) for name, script in SCRIPTS.items()]
)
def test_it_trains(name: str, ranks2: RankPool, megatron_pools: dict[int, RankPool], tmp_path: Path) -> None:
    script = SCRIPTS[name]
    words = words_of(script, tmp_path / "run")
    pool, connections = (megatron_pools[2], "1") if script.size else (ranks2, "2")
    pool.run(launch, words, script.entry, connections, timeout=170)
    steps = read_metrics(tmp_path / "run/save/metrics.jsonl")
    assert [step["iteration"] for step in steps] == [1, 2]
    assert all(
        math.isfinite(step["loss"]) and step["grad_norm"] > 0 and step["tokens_per_second"] > 0 for step in steps
    )
    assert (tmp_path / "run/save/latest_checkpointed_iteration.txt").read_text() == "2"
