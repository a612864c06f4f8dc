"""Answers to validation rows while a model is trained (--eval-generate), by the model itself, and their score."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mindspeed_mm.backends.protocol import Backend, Generation
from mindspeed_mm.configs.eval_metrics import AnswerScoreName
from mindspeed_mm.configs.model_config import TransformersModelConfig
from mindspeed_mm.configs.recipe import GeneratedFigures
from mindspeed_mm.configs.run import Run
from mindspeed_mm.configs.vlm_config import VLMModelConfig
from mindspeed_mm.data.loading.dataset import RecordDataset
from mindspeed_mm.data.loading.loader import MMDataLoader
from mindspeed_mm.data.loading.providers import ValidData
from mindspeed_mm.models.common.build_context import BuildContext, build_context
from mindspeed_mm.models.common.modelzoo import ModelHub
from mindspeed_mm.models.transformers.meta_model import config_for
from mindspeed_mm.models.transformers_model import load_hf_config
from mindspeed_mm.tasks.evaluation.questions import OwnQuestions
from mindspeed_mm.tasks.evaluation.report import score_rows
from mindspeed_mm.tasks.evaluation.scores import Score, find_score
from mindspeed_mm.tasks.inference.generation import AnswerGenerator
from mindspeed_mm.tasks.inference.loading import read_generation_config
from mindspeed_mm.tasks.inference.plan import PlannedBatch, plan_batches, share, share_in_lockstep
from mindspeed_mm.tasks.inference.prompts import PromptEncoder, PromptSize
from mindspeed_mm.tasks.inference.requests import SourceRequests
from mindspeed_mm.tasks.inference.session import check_length, positions_in
from mindspeed_mm.tasks.inference.settings import GenerationSettings
from mindspeed_mm.utils.errors import BadSample, ConfigError
from mindspeed_mm.utils.log import notice

_SHOWN_ROWS = 3
_SHOWN_CHARACTERS = 200


def open_validation_answers(run: Run, valid: ValidData) -> ValidationAnswers | None:
    """Return the scorer of a run's answers; None without --eval-generate.

    Args:
        run: the run.
        valid: its validation data.

    Raises:
        ConfigError: the rows have no answers to compare with, or aren't data.json's, or the model can't answer.
        BadSample: a row can't be asked, and `on_bad_sample` is raise.
    """
    if run.logging.eval_generate is None:
        return None
    flag = f"--eval-generate {run.logging.eval_generate}"
    dataset = valid.loader.dataset if isinstance(valid.loader, MMDataLoader) else None
    if not isinstance(dataset, RecordDataset) or dataset.source.is_text:
        raise ConfigError(
            f"{flag}: the validation data are no rows with turns that data.json names, so that there is nothing to "
            "answer; leave the flag out"
        )
    score = find_score(run.logging.eval_generate, run.logging.eval_generate_language, "--eval-generate-language")
    config, directory = _require_generation(run, flag)
    try:
        questions = _questions_of(dataset, score, run.logging.eval_generate_rows)
    except BadSample as error:
        raise ConfigError(f"{flag}: {error}") from error
    prompts = PromptEncoder(dataset.param, dataset.adapter, dataset.lazy_encoder)
    values = {"max_new_tokens": run.logging.eval_max_new_tokens, "do_sample": False, "num_beams": 1}
    settings = GenerationSettings(values, batch_size=run.logging.eval_generate_batch_size)
    return ValidationAnswers(
        questions, run.logging.eval_generate, score, prompts, settings, positions_in(config), directory
    )


class ValidationAnswers:
    """Answers the same rows at each call, and scores the answers as evaluate_vlm.py does.

    Batches are the same whatever the number of processes, and answers are scored in the order of the rows.

    Args:
        questions: the rows.
        metric: name of the answers' score in figures.
        score: how they are scored.
        prompts: encodes the rows.
        settings: how they are answered.
        positions: of the model, for prompt and answer together; None: any number.
        directory: HF directory whose generation_config.json is the model's; None: it has none.

    Raises:
        BadSample: a row can't be asked, and `on_bad_sample` is raise; with skip its answer counts as empty.
    """

    def __init__(
        self,
        questions: OwnQuestions,
        metric: AnswerScoreName,
        score: Score,
        prompts: PromptEncoder,
        settings: GenerationSettings,
        positions: int | None,
        directory: Path | None,
    ) -> None:
        self._questions, self._metric, self._score, self._prompts = questions, metric, score, prompts
        self._settings, self._directory = settings, directory
        self._sizes = _measure(questions, prompts, positions)
        most = int(settings.values["max_new_tokens"])
        longest = None if positions is None else positions - most
        self._batches = plan_batches(self._sizes, settings.batch_size, longest=longest)

    def __call__(self, backend: Backend) -> GeneratedFigures:
        """Answer the rows with the model of a backend; a collective of all ranks."""
        with backend.generation() as generation:
            answers = self._answer(generation, backend)
        in_order = [answers.get(index) for index in range(len(self._questions))]
        scored = score_rows(self._questions, in_order, self._score)
        total = self._score.total([line["score"] for line in scored])
        samples = [
            {
                "index": line["index"],
                "prompt": self._end_of_prompt(line["index"]),
                "answer": line["prediction"],
                "reference": line["references"][0],
            }
            for line in scored[:_SHOWN_ROWS]
        ]
        return GeneratedFigures({self._metric: math.nan if total is None else total}, len(scored), samples)

    def _answer(self, generation: Generation, backend: Backend) -> dict[int, str]:
        """All answers, on all ranks. They are gathered round by round: no rank waits longer than for a batch."""
        if generation.in_lockstep:
            mine = share_in_lockstep(self._batches, self._sizes, generation.rank, generation.size)
            rounds = len(mine)
        else:
            mine = share(self._batches, generation.rank, generation.size)
            rounds = -(-len(self._batches) // generation.size)
        answers: dict[int, str] = {}
        with self._configured(generation.model):
            generator = None
            if generation.model is not None and rounds:
                lockstep = generation.in_lockstep
                generator = AnswerGenerator(generation.model, self._prompts, self._settings, lockstep=lockstep)
            for number in range(rounds):
                own = {} if generator is None or number >= len(mine) else self._answer_batch(generator, mine[number])
                for part in backend.gather_objects(own):
                    answers |= part
        return answers

    def _answer_batch(self, generator: AnswerGenerator, batch: PlannedBatch) -> dict[int, str]:
        found = generator.answer([self._questions[index] for index in batch.indices])
        return {index: answer.text for index, answer in zip(batch.indices, found, strict=True)} if batch.counts else {}

    @contextmanager
    def _configured(self, model: Any) -> Iterator[None]:
        """Give a model the generation configuration of its directory, as one that is loaded from there has it."""
        if model is None or self._directory is None:
            yield
            return
        kept = model.generation_config
        read_generation_config(model, self._directory)
        try:
            yield
        finally:
            model.generation_config = kept

    def _end_of_prompt(self, index: int) -> str:
        parts = self._questions[index].conversation.messages[-1].parts
        return "".join(part for part in parts if isinstance(part, str))[-_SHOWN_CHARACTERS:]


def _questions_of(dataset: RecordDataset, score: Score, limit: int) -> OwnQuestions:
    """Return the first rows of a data set as questions.

    Raises:
        BadSample: one of them has no answer to compare with.
    """
    requests = SourceRequests(dataset.source, None if dataset.indices is None else dataset.indices.tolist())
    questions = OwnQuestions(requests, score, limit=limit)
    for index in range(len(questions)):
        questions.question(index)
    return questions


def _measure(questions: OwnQuestions, prompts: PromptEncoder, positions: int | None) -> Mapping[int, PromptSize]:
    """The sizes of the prompts of all rows that can be asked; with `on_bad_sample: skip` there may be others."""
    skips = prompts.param.basic_parameters.on_bad_sample == "skip"
    sizes: dict[int, PromptSize] = {}
    faults: list[str] = []
    for index in range(len(questions)):
        try:
            request = questions[index]
            size = prompts.measure(request)
            check_length(request, size, positions)
            sizes[index] = size
        except BadSample as error:
            if not skips:
                raise
            faults.append(str(error))
    if faults:
        notice(
            f"--eval-generate: {len(faults)} of {len(questions)} rows can't be answered and count as empty answers: "
            f"{faults[0]}"
        )
    return sizes


def _require_generation(run: Run, flag: str) -> tuple[Any, Path | None]:
    """Return transformers' configuration of the model that is trained, and its directory.

    Raises:
        ConfigError: the model generates no text, or has an encoder that runs by itself.
    """
    described = run.model
    assert isinstance(described, (TransformersModelConfig, VLMModelConfig)), "the recipe's schema is theirs"
    path = described.init_from_hf_path
    if isinstance(described, TransformersModelConfig):
        ModelHub.import_plugins(described.plugin)
        with build_context(BuildContext(trust_remote_code=run.trust_remote_code)):
            config = load_hf_config(str(path), f"{described.file}: init_from_hf_path")
        model_class: Any = ModelHub.get(described.model_id, config, where=described.file)
        config = config_for(model_class, config)
    else:
        config = described.hf_config()
        model_class = ModelHub.get(None, config)
    if not model_class.can_generate():
        raise ConfigError(f"{flag}: {model_class.__name__} generates no text; leave the flag out")
    if config.is_encoder_decoder:
        raise ConfigError(
            f"{flag}: {model_class.__name__} has an encoder that runs by itself, which isn't done while it is trained; "
            "leave the flag out, and evaluate checkpoints with evaluate_vlm.py"
        )
    return config, Path(path) if path else None
