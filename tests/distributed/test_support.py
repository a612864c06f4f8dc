"""The suite's own tools: workers that report, fail and recover, and tiny models that are real."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.tiny import tiny_qwen2_5_vl_dir, tiny_qwen3_dir, write_mixed_dataset
from tests.support.workers import RankError, RankPool, run_ranks


def launcher_variables() -> tuple[str, str, str, bool, bool]:
    return (
        os.environ["RANK"],
        os.environ["WORLD_SIZE"],
        os.environ["LOCAL_RANK"],
        int(os.environ["MASTER_PORT"]) > 0,
        dist.is_initialized(),
    )


def summed_rank(offset: int) -> torch.Tensor:
    value = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(value)
    return value


def fail_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        print("seen before the failure")
        raise KeyError("missing key of this rank")
    dist.barrier()


def exit_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)


def sleep_for(seconds: float) -> None:
    time.sleep(seconds)


def modules_of_megatron() -> list[str]:
    return [name for name in sys.modules if name.split(".")[:2] == ["megatron", "core"]]


def threads_and_random() -> tuple[int, float, str | None]:
    seen = os.environ.get("LEFT_BEHIND")
    os.environ["LEFT_BEHIND"] = "yes"
    return torch.get_num_threads(), float(torch.rand(())), seen


def leave_group() -> bool:
    dist.destroy_process_group()
    return dist.is_initialized()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_fresh_ranks_get_what_a_launcher_sets() -> None:
    assert run_ranks(launcher_variables, 2) == [("0", "2", "0", True, False), ("1", "2", "1", True, False)]


def test_pool_runs_many_functions_in_the_same_processes(ranks2: RankPool) -> None:
    assert [float(value) for value in ranks2.run(summed_rank, 0)] == [1.0, 1.0]
    pids = ranks2.pids
    assert [float(value) for value in ranks2.run(summed_rank, 10)] == [21.0, 21.0]
    assert ranks2.pids == pids
    assert ranks2.run(modules_of_megatron) == [[], []]


def test_functions_do_not_see_each_other(ranks2: RankPool) -> None:
    first = ranks2.run(threads_and_random)
    assert first[0][0] == 1
    assert first[0][2] is None
    assert ranks2.run(threads_and_random) == first


def test_a_group_that_a_function_destroyed_is_made_again(ranks2: RankPool) -> None:
    assert ranks2.run(leave_group) == [False, False]
    assert [float(value) for value in ranks2.run(summed_rank, 0)] == [1.0, 1.0]


def test_failure_carries_traceback_and_output_and_the_pool_recovers(ranks2: RankPool) -> None:
    ranks2.run(summed_rank, 0)
    pids = ranks2.pids
    with pytest.raises(RankError, match="missing key of this rank") as error:
        ranks2.run(fail_on_rank, 1)
    assert "rank 1 raised" in str(error.value)
    assert "fail_on_rank" in str(error.value)
    assert "seen before the failure" in str(error.value)
    assert not any(alive(pid) for pid in pids)
    assert [float(value) for value in ranks2.run(summed_rank, 0)] == [1.0, 1.0]


def test_death_of_a_rank_is_named(ranks2: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code 7"):
        ranks2.run(exit_on_rank, 0)
    assert [float(value) for value in ranks2.run(summed_rank, 0)] == [1.0, 1.0]


def test_time_out_kills_the_ranks() -> None:
    started = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0, 1 not finished after 1 s"):
        run_ranks(sleep_for, 2, 60.0, timeout=1.0)
    assert time.monotonic() - started < 20


def test_tiny_qwen2_5_vl_is_a_real_directory(tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    folder = tiny_qwen2_5_vl_dir(tmp_path / "model", seed=3)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    processor = AutoProcessor.from_pretrained(folder)
    tokenizer = processor.tokenizer
    # The published order: the added tokens follow the plain vocabulary, <|endoftext|> first.
    start = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"]) == [start + 1, start + 2]
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1 == model.config.text_config.vocab_size - 1
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert model.generation_config.eos_token_id == [start + 2, start]

    rows = json.loads(write_mixed_dataset(tmp_path / "data", rows=6, seed=1).read_text())
    row = next(row for row in rows if len(row["images"]) == 2)
    content = [{"type": "image", "path": str(tmp_path / "data" / name)} for name in row["images"]]
    content.append({"type": "text", "text": row["messages"][0]["content"].replace("<image>", "")})
    batch = processor.apply_chat_template(
        [{"role": "user", "content": content}, row["messages"][1]], tokenize=True, return_dict=True, return_tensors="pt"
    )
    text = tokenizer.decode(batch["input_ids"][0])
    system = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
    assert text.startswith(system + "<|im_start|>user\n<|vision_start|>")
    assert text.endswith(row["messages"][1]["content"] + "<|im_end|>\n")
    assert (batch["input_ids"] == model.config.image_token_id).sum() == batch["pixel_values"].shape[0] // 4
    assert torch.isfinite(model(**batch).logits).all()


def test_tiny_qwen3_ties_and_has_no_processor(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir(tmp_path / "tied"))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not (tmp_path / "tied" / "processor_config.json").exists()
    bare = tiny_qwen3_dir(tmp_path / "bare", weights=False)
    assert not list(bare.glob("*.safetensors"))
    other = AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir(tmp_path / "untied", seed=1, tie=False))
    assert other.lm_head.weight is not other.model.embed_tokens.weight


def test_mixed_data_set_is_the_same_for_the_same_seed(tmp_path: Path) -> None:
    first = write_mixed_dataset(tmp_path / "a", rows=9, seed=5)
    again = write_mixed_dataset(tmp_path / "b", rows=9, seed=5)
    assert first.read_bytes() == again.read_bytes()
    rows = json.loads(first.read_text())
    assert sorted(len(row["images"]) for row in rows) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for row in rows:
        placeholders = sum(message["content"].count("<image>") for message in row["messages"])
        assert placeholders == len(row["images"])
        for name in row["images"]:
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert len({len(row["messages"]) for row in rows}) > 1
