"""The launches of docs/parallelism.md, beside the model of docs/own_model.md, each on as few processes as it takes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from scripts.docs_runs.common import DocumentError, Done, exchange, expect, fences, items, key, start

#: what differs in every launch
SMALLEST = {"--train-iters 1000": "--train-iters 1 --distributed-backend gloo --num-workers 0"}
#: a flag that only this launch has → what is run instead, and on how many processes
LAUNCHES = {
    "--context-parallel-size": ({"--global-batch-size 8": "--global-batch-size 1"}, 4),
    "--expert-model-parallel-size": (
        {
            "--expert-model-parallel-size 8": "--expert-model-parallel-size 2",
            "--global-batch-size 8": "--global-batch-size 2",
        },
        2,
    ),
    "--pipeline-model-parallel-size": (
        {"--global-batch-size 64": "--global-batch-size 1", "--save runs/mine": "--save runs/megatron"},
        4,
    ),
}
#: the files of a model with experts, whose rows are text
EXPERTS = {"model.json": "experts.json", "data.json": "text.json", "fsdp2.yaml": "tensor.yaml"}
HF = "ckpt/experts"


def run(page: Path) -> Done:
    """Start every launch once, and that of a model with experts on tensor-parallel layers as the sample states them."""
    write_files(page)
    done: Done = set()
    for command in (item for snippet in fences(page, "bash") for item in items(snippet)):
        flag = next((flag for flag in LAUNCHES if flag in command), None)
        if flag is None:
            raise DocumentError(f"{page.name}: '{command}' is none of the launches that scripts/docs_runs states")
        changes, ranks = LAUNCHES[flag]
        words = exchange(command, {**SMALLEST, **changes}, page)
        if flag.startswith("--pipeline"):
            words = exchange(words, {"model.json": "megatron.json"}, page)
        if flag.startswith("--expert"):
            words = exchange(words, EXPERTS, page) + " --tensor-model-parallel-size 2"
        expect(start(words, page, ranks=ranks), ["done: 1 iterations"], page)
        done.add(key(page, command))
    return done | {key(page, snippet.text) for snippet in fences(page, "yaml")}


def write_files(page: Path) -> None:
    """What the launches read beside docs/own_model.md's files: those of Megatron-core, and of a model with experts."""
    from transformers import Qwen3MoeConfig

    from mindspeed_mm.tools import tiny_models

    (megatron,) = re.findall(r'`(\{"model_id": .*?\})`', page.read_text(encoding="utf-8"))
    Path("megatron.json").write_text(megatron, encoding="utf-8")
    (layers,) = fences(page, "yaml")
    Path("tensor.yaml").write_text(layers.text, encoding="utf-8")

    tokenizer = tiny_models.build_byte_bpe_tokenizer(["What is this? A cat."] * 9, 320, Path(HF))
    dense = tiny_models.qwen3_config(tokenizer, text={"vocab_size": 320}, tie_word_embeddings=False).to_dict()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = Qwen3MoeConfig(**{**dense, **experts, "architectures": ["Qwen3MoeForCausalLM"]})
    tiny_models.save_model_dir(config, tokenizer, HF, 0)

    messages = [{"role": "user", "content": "What is this?"}, {"role": "assistant", "content": "A cat."}]
    rows = {"dataset_dir": "data", "dataset": "data/text.json"}
    data = {
        "dataset_type": "huggingface",
        "preprocess_parameters": {"model_name_or_path": HF},
        "basic_parameters": rows,
    }
    for name, content in {
        "experts.json": {"model_id": "qwen3_moe", "init_from_hf_path": HF},
        "text.json": {"dataset_param": data},
        rows["dataset"]: [{"messages": messages}] * 2,
    }.items():
        Path(name).write_text(json.dumps(content), encoding="utf-8")
