"""A launch of evaluate_vlm.py as one typed description; nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from mindspeed_mm.configs.files import describe_missing
from mindspeed_mm.configs.vlm_evaluation import BenchmarkFlags
from mindspeed_mm.configs.vlm_inference import AnswerConfig, AnswerKeys
from mindspeed_mm.tasks.evaluation.scores import Score, find_score
from mindspeed_mm.tasks.inference.describe import AnswerRun, answer_run, read_words
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.files import refuse_unwritable
from mindspeed_mm.utils.log import notice

if TYPE_CHECKING:
    from mindspeed_mm.tasks.evaluation.benchmark import Benchmark
    from mindspeed_mm.tasks.evaluation.questions import EvaluatedRows

_OF_PROMPTS = ("prompts", "image_path", "video_path")


@dataclass(frozen=True)
class EvaluationRun:
    """What a launch asks for.

    Attributes:
        answers: how rows are answered, and with which model.
        rows: what is asked, with the right answers.
        score: how answers are scored.
        name: the benchmark's, or the file's.
        folder: where results go.
    """

    answers: AnswerRun
    rows: EvaluatedRows
    score: Score
    name: str
    folder: Path


def describe_evaluation(words: Sequence[str], *, complete: bool = True) -> EvaluationRun:
    """Read the words of a launch command, the files that they name, and the first row of each data file.

    Args:
        words: those after the script's name.
        complete: whether the model's directory must have weights and a tokenizer; False: a configuration is enough.

    Raises:
        ConfigError: unknown flags, keys or names, wrong values, missing files.
        CheckpointError: there is no model where the launch says.
        DataError: a data file can't be read, or its rows can't be asked or scored.
    """
    flags, shared, config = read_words(words, BenchmarkFlags)
    for name in ("prompt", "image", "video", "audio"):
        if getattr(flags, name) is not None:
            raise ConfigError(f"--{name} belongs to inference_vlm.py; rows name what is asked")
    keys, file = config.evaluation, config.file
    benchmark = _benchmark(flags, config)
    folder = flags.output or keys.result_output_path
    if not folder:
        raise ConfigError("--output is missing: the folder of results, such as results/my_run")
    refuse_unwritable(folder, "--output" if flags.output else f"{file}: 'result_output_path'")
    path, named_by = flags.data_path or keys.dataset_path, "--data-path"
    if not flags.data_path and path:
        named_by = f"{file}: 'dataset_path'"
        if not Path(path).exists():
            raise ConfigError(f"{named_by}: {describe_missing(path)}")
    if benchmark is not None and path is None:
        raise ConfigError(f"--data-path is missing: the file or folder of {benchmark.name}")
    if keys.evaluation_model:
        notice(f"{file}: no effect here: evaluation_model: config.json says which model it is")
    answers = answer_run(
        replace(flags, data_path=path, output=str(Path(folder) / "predictions.jsonl")),
        shared,
        _without_prompts(config),
        complete=complete,
    )
    from mindspeed_mm.tasks.evaluation.questions import BenchmarkQuestions, OwnQuestions
    from mindspeed_mm.tasks.inference.requests import RowRequests

    if benchmark is None:
        score = find_score(flags.score or "exact_match", flags.language)
        own = OwnQuestions(RowRequests(answers.param), score, flags.category, flags.limit)
        return EvaluationRun(answers, own, score, ", ".join(Path(p).name for p in own.paths), Path(folder))
    assert path is not None, "a benchmark has a path"
    questions = BenchmarkQuestions(benchmark, path, answers.system, flags.limit, named_by)
    return EvaluationRun(_limited(answers, benchmark), questions, benchmark.score, benchmark.name, Path(folder))


def _benchmark(flags: BenchmarkFlags, config: AnswerConfig) -> Benchmark | None:
    """The benchmark that flags or file name; None: the rows are a user's own."""
    name, named_by = flags.benchmark, "--benchmark"
    if not name:
        name, named_by = config.evaluation.evaluation_dataset, f"{config.file}: 'evaluation_dataset'"
    if not name:
        return None
    from mindspeed_mm.tasks.evaluation.benchmarks import find_benchmark

    benchmark = find_benchmark(name, named_by)
    own = {"--score": flags.score, "--language": flags.language, "--category": flags.category}
    for flag, given in own.items():
        if given is not None:
            raise ConfigError(
                f"{flag} {given}: it is for rows of your own; {benchmark.name} has its own score and categories"
            )
    return benchmark


def _without_prompts(config: AnswerConfig) -> AnswerConfig:
    """A file's description without prompts of inference_vlm.py."""
    if given := [name for name in _OF_PROMPTS if getattr(config.keys, name) is not None]:
        notice(f"{config.file}: no effect here: {', '.join(given)}: rows are asked, not prompts")
    keys: AnswerKeys = config.keys.model_copy(update=dict.fromkeys(_OF_PROMPTS))
    return replace(config, keys=keys)


def _limited(answers: AnswerRun, benchmark: Benchmark) -> AnswerRun:
    """Answers as long as the benchmark's, unless the launch states another length."""
    values = {"max_new_tokens": benchmark.max_new_tokens, **answers.settings.values}
    return replace(answers, settings=replace(answers.settings, values=values))
