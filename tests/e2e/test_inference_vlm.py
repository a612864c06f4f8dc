"""inference_vlm.py and `mindspeed-mm chat` as they are launched: published files, adapters, a conversation."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from mindspeed_mm.tasks.inference import command
from mindspeed_mm.tools import cli
from mindspeed_mm.utils.errors import BadSample, ConfigError
from tests.support.answers import AnswerCase, inputs_of, launch, transformers_answers
from tests.support.workers import RankPool

#: words of both published launches, but for paths and sizes
PUBLISHED = (
    "--use-mcore-models --tensor-model-parallel-size 1 --micro-batch-size 1 --global-batch-size 1 --tokenizer-type "
    "NullTokenizer --vocab-size 152064 --seq-length 1024 --make-vocab-size-divisible-by 1 --normalization RMSNorm "
    "--use-fused-rmsnorm --swiglu --use-fused-swiglu --seed 42 --use-flash-attn --no-load-optim --no-load-rng "
    "--log-interval 1 --save-interval 10000 --eval-interval 10000 --eval-iters 5000 --distributed-backend nccl"
)
QUESTIONS = ("what is this", "how many are there", "where is it")


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> AnswerCase:
    return AnswerCase("qwen2_5_vl", tmp_path_factory.mktemp("vlm"))


@pytest.fixture(scope="module")
def text_case(tmp_path_factory: pytest.TempPathFactory) -> AnswerCase:
    return AnswerCase("qwen3", tmp_path_factory.mktemp("text"))


def published_file(case: AnswerCase, images: list[str]) -> dict[str, Any]:
    """A published inference file, with the numbers of a tiny model; its pictures are not scaled up."""
    config = json.loads((case.hf_dir / "config.json").read_text())
    text, tower = config["text_config"], config["vision_config"]
    unset = ("constraints", "guidance_scale", "bad_words_ids", "forced_bos_token_id", "min_p", "penalty_alpha")
    unset += ("dola_layers", "cache_config", "low_memory", "max_time", "stop_strings", "watermarking_config")
    return {
        "pipeline_class": "Qwen2VlPipeline",
        "img_context_token_id": 151655,
        "image_encoder": {
            "vision_encoder": {
                "model_id": "qwen2vit",
                "num_layers": tower["depth"],
                "hidden_size": tower["hidden_size"],
                "ffn_hidden_size": tower["intermediate_size"],
                "num_attention_heads": tower["num_heads"],
                "gated_linear_unit": True,
                "llm_hidden_size": text["hidden_size"],
                "bf16": True,
                "params_dtype": "bf16",
                "freeze": True,
                "pipeline_num_layers": [32, 0, 0, 0],
            },
            "vision_projector": {"model_id": "lnmlp", "num_layers": 1, "hidden_size": text["hidden_size"]},
        },
        "text_decoder": {
            "model_id": "qwen2_5_lm",
            "num_layers": text["num_hidden_layers"],
            "pipeline_num_layers": [1, 10, 10, 7],
            "hidden_size": text["hidden_size"],
            "ffn_hidden_size": text["intermediate_size"],
            "num_attention_heads": text["num_attention_heads"],
            "group_query_attention": True,
            "num_query_groups": text["num_key_value_heads"],
            "position_embedding_type": "mrope",
            "use_infer_fa": True,
        },
        "text_encoder": None,
        "video_encoder": None,
        "dtype": "fp32",
        "device": "npu",
        "tokenizer": {
            "hub_backend": "hf",
            "autotokenizer_name": "AutoTokenizer",
            "from_pretrained": str(case.hf_dir),
        },
        "generation_config": {
            **dict.fromkeys(unset),
            "do_sample": True,
            "kv_cache": True,
            "output_scores": False,
            "max_length": 20,
            "num_beam_groups": 1,
            "num_return_sequences": 1,
            "diversity_penalty": 0.0,
            "repetition_penalty": 1.05,
            "max_new_tokens": 6,
            "temperature": 0.1,
            "top_k": 1,
            "top_p": 0.001,
        },
        "patch": {"infer_fa": True},
        "min_pixels": 3136,
        "max_pixels": 12845056,
        "image_path": images,
        "prompts": list(QUESTIONS),
    }


def printed_by(words: list[str]) -> str:
    """What a launch prints on standard output."""
    output, before = io.StringIO(), sys.stdout
    sys.stdout = output
    try:
        command.main(words)
    finally:
        sys.stdout = before
    return output.getvalue()


def test_published_launches_answer(
    case: AnswerCase, ranks4: RankPool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The 7B launch by itself, the 72B one on four processes whose stages become shards: three prompts with a picture,
    as transformers answers them, drawn from the one likeliest token."""
    file, images = tmp_path / "inference.json", ["0_0.png", "1_0.png", "3_0.png"]
    file.write_text(json.dumps(published_file(case, [str(case.data.parent / image) for image in images])))
    words = [*PUBLISHED.split(), "--load", str(case.hf_dir), "--mm-model", str(file)]
    answer = {"role": "assistant", "content": ""}
    asked = AnswerCase.of(
        case,
        [
            {"messages": [{"role": "user", "content": f"<image>{text}"}, answer], "images": [image]}
            for text, image in zip(QUESTIONS, images, strict=True)
        ],
    )
    expected = transformers_answers(asked, max_new_tokens=6, repetition_penalty=1.05)
    assert len(set(expected)) > 1
    command.main([*words, "--pipeline-model-parallel-size", "1"])
    assert capsys.readouterr().out == "\n".join(expected) + "\n"
    found = ranks4.run(printed_by, [*words, "--pipeline-model-parallel-size", "4", "--variable-seq-lengths"])
    assert found == ["\n".join(expected) + "\n", "", "", ""]


def test_a_conversation_keeps_its_history(
    case: AnswerCase, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns, the second one with the first and its picture before it, then a new conversation; faults of a line
    are sentences."""
    image = case.data.parent / "0_0.png"
    lines = [f"/image {image}", "what is this", "", "/audio x.wav", "/imag y", "/image gone.png", "how many", "/clear"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join([*lines, "how many", "/exit", "never"])))
    assert cli.main(["chat", str(case.hf_dir), "--max-new-tokens", "8"]) == 0
    found = capsys.readouterr()

    def answered(*turns: str) -> str:
        roles = [{"role": role, "content": text} for role, text in zip(["user", "assistant"] * 2, turns, strict=False)]
        row = {"messages": [*roles, {"role": "assistant", "content": ""}], "images": []}
        row["images"] = ["0_0.png"] if "<image>" in turns[0] else []
        return transformers_answers(AnswerCase.of(case, [row]))[0]

    first = answered("<image>what is this")
    expected = [first, answered("<image>what is this", first, "how many"), answered("how many")]
    assert found.out == "".join(f"{text}\n" for text in expected)
    assert len(set(expected)) == 3
    for sentence in (
        "/audio: this model takes image, video",
        "there is no command /imag; did you mean 'image'?",
        "/image: gone.png does not exist",
        "the answer is cut off after 8 tokens (--max-new-tokens)",
    ):
        assert sentence in found.err


def test_an_adapter_answers_as_peft(text_case: AnswerCase, tmp_path: Path) -> None:
    """A PEFT directory, beside its base and merged into it: PEFT's own answers, which aren't the base's."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(text_case.hf_dir, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
    config.base_model_name_or_path = str(text_case.hf_dir)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(text_case.hf_dir, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    tokenizer = AutoTokenizer.from_pretrained(text_case.hf_dir)
    expected = []
    for row in text_case.rows:
        inputs = inputs_of(text_case, tokenizer, row)
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=8)[0, inputs["input_ids"].shape[1] :]
        expected.append(tokenizer.decode(ids, skip_special_tokens=True))
    flags = {"load": tmp_path / "adapter", "data_path": text_case.data, "batch_size": 4}
    for number, words in enumerate(([], ["--merge-adapter"])):
        lines = launch(tmp_path / f"{number}.jsonl", *words, **flags)
        assert [line["answer"] for line in lines] == expected
    lines = launch(tmp_path / "base.jsonl", **{**flags, "load": text_case.hf_dir})
    assert [line["answer"] for line in lines] != expected


def test_drawn_tokens_and_stops(text_case: AnswerCase, tmp_path: Path) -> None:
    """Tokens are drawn by seed and row, whatever the batch size; a stop text ends an answer and isn't part of it."""
    flags = {"load": text_case.hf_dir, "data_path": text_case.data}
    drawn = {"do_sample": True, "temperature": 3, "seed": 1}
    one = launch(tmp_path / "1.jsonl", **flags, **drawn)
    assert launch(tmp_path / "2.jsonl", **flags, **drawn, batch_size=4) == one
    assert launch(tmp_path / "3.jsonl", **flags, **{**drawn, "seed": 2}) != one
    greedy = launch(tmp_path / "4.jsonl", **flags)
    stop = greedy[0]["answer"][2:4]
    stopped = launch(tmp_path / "5.jsonl", **flags, stop=stop)
    assert stopped[0]["answer"] == greedy[0]["answer"].partition(stop)[0] and stopped[0]["finish"] == "stop"
    assert stopped[0]["new_tokens"] < greedy[0]["new_tokens"]
    assert launch(tmp_path / "6.jsonl", **flags, stop=stop, batch_size=1) == stopped


def test_rows_without_answers_and_faulty_ones(case: AnswerCase, tmp_path: Path) -> None:
    """Prompts alone are rows; a row that can't be answered ends the launch, or with on_bad_sample has an error."""
    rows = [{"id": "a", "query": "what is it", "images": []}, {"query": "<image>how", "images": ["0_0.png"]}]
    file = case.data.parent / "prompts.json"
    file.write_text(json.dumps(rows))
    lines = launch(tmp_path / "1.jsonl", load=case.hf_dir, data_path=file)
    assert [line.get("id") for line in lines] == ["a", None] and not any("reference" in line for line in lines)
    asked = [
        {
            "messages": [{"role": "user", "content": row["query"]}, {"role": "assistant", "content": ""}],
            "images": row["images"],
        }
        for row in rows
    ]
    assert [line["answer"] for line in lines] == transformers_answers(AnswerCase.of(case, asked))
    file.write_text(json.dumps([*rows, {"query": "<image>how", "images": ["gone.png"]}]))
    with pytest.raises(BadSample, match=r"prompts\.json, row 3: .*gone\.png"):
        launch(tmp_path / "2.jsonl", load=case.hf_dir, data_path=file)
    basic = {"dataset": str(file), "dataset_dir": str(file.parent), "on_bad_sample": "skip"}
    param = {"dataset_type": "huggingface", "basic_parameters": basic}
    param["preprocess_parameters"] = {"model_name_or_path": str(case.hf_dir), "image_max_pixels": 1568}
    (tmp_path / "data.json").write_text(json.dumps({"dataset_param": param}))
    skipped = launch(tmp_path / "3.jsonl", load=case.hf_dir, mm_data=tmp_path / "data.json")
    assert skipped[0] == lines[0] and skipped[2]["answer"] is None and "gone.png" in skipped[2]["error"]
    assert skipped[1]["prompt_tokens"] < lines[1]["prompt_tokens"]  # data.json scales pictures down


def test_media_and_prompts_that_do_not_fit(case: AnswerCase, text_case: AnswerCase, tmp_path: Path) -> None:
    """One sentence each, before the model is built."""
    image = case.data.parent / "0_0.png"
    with pytest.raises(BadSample, match=r"the prompt: the row has 1 image\(s\), but the model in .* takes text only"):
        command.main(["--load", str(text_case.hf_dir), "--prompt", "x", "--image", str(image)])
    positions = json.loads((text_case.hf_dir / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(BadSample, match=rf"tokens, and the model has {positions} positions"):
        command.main(["--load", str(text_case.hf_dir), "--prompt", "x " * positions])
    rows = {"load": text_case.hf_dir, "data_path": text_case.data}
    (tmp_path / "model.json").write_text(json.dumps({"generation_config": {"min_new_tokens": 9}}))
    with pytest.raises(ConfigError, match="min_new_tokens is 9 and max_new_tokens 2; write at most 2"):
        launch(tmp_path / "a.jsonl", mm_model=tmp_path / "model.json", **rows, max_new_tokens=2)


def test_a_yaml_file_in_the_place_of_flags(text_case: AnswerCase, tmp_path: Path) -> None:
    content = {"load": str(text_case.hf_dir), "load_format": "hf", "data_path": str(text_case.data), "adapter": "qwen3"}
    content["generation"] = {"max_new_tokens": 8, "do_sample": False, "use_cache": True}
    (tmp_path / "run.yaml").write_text(json.dumps({"inference": content, "training": {"lr": 1}}))
    command.main([str(tmp_path / "run.yaml"), "--output", str(tmp_path / "a.jsonl")])
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [line["answer"] for line in lines] == transformers_answers(text_case)
