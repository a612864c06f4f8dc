"""--allow-tf32 acts in the scripts of inference and evaluation as it does in training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from mindspeed_mm.tasks.generation import evaluation, inference
from mindspeed_mm.tasks.inference.command import main as answer
from mindspeed_mm.tasks.serving import vllm_server
from mindspeed_mm.tasks.serving.describe import describe_serving
from tests.support.fake_accelerator import fake_accelerator
from tests.support.tiny import tiny_qwen3_dir


class Stopped(Exception):
    """Raised in the place of the work."""


def answer_words(folder: Path) -> list[str]:
    return ["--load", str(tiny_qwen3_dir(folder / "hf")), "--prompt", "1 + 1"]


def sampling_words(folder: Path) -> list[str]:
    (folder / "prompts.txt").write_text("a cat\n")
    words = ["--load", str(folder), "--prompts", str(folder / "prompts.txt"), "--save-path", str(folder / "out")]
    return [*words, "--size", "1", "16", "16"]


def feature_words(folder: Path) -> list[str]:
    np.save(folder / "a.npy", np.random.default_rng(0).normal(size=(8, 2)))
    return ["--features-a", str(folder / "a.npy"), "--features-b", str(folder / "a.npy"), "--subset", "4"]


SCRIPTS = {
    "inference_vlm.py": (answer, answer_words, "mindspeed_mm.tasks.inference.session.load_model"),
    "inference_sora.py": (inference.main, sampling_words, "mindspeed_mm.tasks.generation.inference._open"),
    "evaluate_gen.py": (evaluation.main, feature_words, "mindspeed_mm.tasks.generation.evaluation._distances"),
}


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("flag", [[], ["--allow-tf32"]], ids=["without", "with"])
def test_the_flag_acts(script: str, flag: list[str], tmp_path: Path) -> None:
    main: Callable[[list[str]], int]
    main, words_of, work = SCRIPTS[script]
    words = words_of(tmp_path)
    with fake_accelerator() as fake, mock.patch(work, side_effect=Stopped), pytest.raises(Stopped):
        main([*words, *flag])
    assert fake.log.count("tf32") == len(flag)


def test_vllm_computes_as_it_chooses(tmp_path: Path) -> None:
    run = describe_serving(["--load", str(tiny_qwen3_dir(tmp_path / "hf")), "--allow-tf32"])
    with (
        mock.patch.object(vllm_server, "notice") as notice,
        mock.patch.object(vllm_server, "exported", side_effect=Stopped),
        pytest.raises(Stopped),
    ):
        vllm_server.serve_with_vllm(run)
    assert "--allow-tf32 has no effect here" in notice.call_args.args[0]
