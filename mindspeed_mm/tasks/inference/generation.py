"""Generate answers with transformers' `generate`: batches of prompts, or one prompt whose answer is streamed."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from mindspeed_mm import accelerator
from mindspeed_mm.data.conversation.encode import TokenSample
from mindspeed_mm.tasks.inference.decoding import decode_greedily
from mindspeed_mm.tasks.inference.prompts import PromptEncoder
from mindspeed_mm.tasks.inference.requests import AnswerRequest
from mindspeed_mm.tasks.inference.settings import LONGEST_ANSWER, GenerationSettings
from mindspeed_mm.utils.errors import ConfigError, DataError
from mindspeed_mm.utils.sample_random import sample_key

if TYPE_CHECKING:
    from transformers import StoppingCriteria, StoppingCriteriaList
    from transformers.generation.streamers import BaseStreamer


@dataclass(frozen=True)
class Answer:
    """An answer.

    Attributes:
        text: without the tokens or the text that ended it.
        prompt_tokens, new_tokens: lengths of prompt and answer; the token that ended it counts.
        finish: why it ended: the model ended it, or a text of the settings, or it was as long as it may be.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    finish: Literal["end", "stop", "length"]


class AnswerGenerator:
    """Answers requests with a model.

    Args:
        model: a transformers model in evaluation mode.
        prompts: encodes requests for it.
        settings: how answers are generated; they take precedence over the model's generation configuration.
        lockstep: parameters are sharded over the processes, which call `answer` equally often, with batches that have
            the same kinds of media.
    """

    def __init__(
        self, model: Any, prompts: PromptEncoder, settings: GenerationSettings, *, lockstep: bool = False
    ) -> None:
        self.model = model
        self.prompts = prompts
        self.settings = settings
        self._lockstep = lockstep
        self._name = type(model).__name__.removeprefix("FSDP")
        self.config = self._generation_config()
        if lockstep:
            self._find_root_unit()
        self._has_encoder: bool = model.config.is_encoder_decoder
        is_greedy = self.config.get_generation_mode() == "greedy_search"
        self._leaves_at_end = is_greedy and not self._has_encoder and not lockstep
        if self._has_encoder and lockstep:
            raise ConfigError(
                f"{self._name} has an encoder that runs by itself, and isn't sharded; leave --use-torch-fsdp2 out"
            )

    def answer(
        self,
        requests: Sequence[AnswerRequest],
        samples: Sequence[TokenSample] | None = None,
        streamer: BaseStreamer | None = None,
        stopping: Sequence[StoppingCriteria] = (),
    ) -> list[Answer]:
        """Answer requests in one batch; tokens that are drawn depend on the settings' seed and a request's index.

        Args:
            requests: one, if tokens are drawn.
            samples: the requests as `prompts` encodes them; None: they are encoded here.
            streamer: receives the ids of the prompts [batch, length], then of each step [batch], on the host.
            stopping: further reasons for an answer to end.
        """
        if samples is None:
            samples = [self.prompts.encode(request) for request in requests]
        batch = self._on_device(self.prompts.batch(samples))
        begin = batch["input_ids"].shape[1]
        if self._has_encoder:  # its prompts are those of the decoder, all alike, and no part of the output
            del batch["attention_mask"]
            batch["decoder_input_ids"], begin = batch.pop("input_ids"), 0
        accelerator.current().manual_seed(sample_key(self.settings.seed, requests[0].index, 0))
        leaves = self._leaves_at_end and len(requests) > 1 and streamer is None
        if self._lockstep:
            self.model.unshard()  # `generate` runs encoders of media before it calls the model
        try:
            with torch.no_grad():
                output = self.model.generate(
                    **batch,
                    generation_config=copy.deepcopy(self.config),
                    streamer=streamer,
                    synced_gpus=self._lockstep,
                    stopping_criteria=self._stops(stopping),
                    custom_generate=decode_greedily if leaves else None,
                )
        except (ValueError, AttributeError) as error:  # transformers' checks, and what its models lack for `generate`
            where = " and ".join(str(request.conversation.where) for request in requests[:2])
            raise DataError(f"{where}: {self._name} can't answer: {error}") from error
        lengths = [len(sample["input_ids"]) for sample in samples]
        return [self._read(row, length) for row, length in zip(output[:, begin:].tolist(), lengths, strict=True)]

    def stream(self, request: AnswerRequest, write: Callable[[str], None]) -> Answer:
        """Answer a request, and write its text as it is generated.

        Args:
            write: receives pieces of the text, the last one when the answer is there.
        """
        return self.answer([request], streamer=_streamer(self.prompts.tokenizer, write))[0]

    @property
    def end_ids(self) -> frozenset[int]:
        """Ids of the tokens that end an answer."""
        ends = self.config.eos_token_id
        return frozenset(ends if isinstance(ends, list) else [ends])

    @torch.no_grad()
    def _find_root_unit(self) -> None:
        """Run the whole model once: a unit of fully_shard that is run before would take itself for the root."""
        ids = torch.full((1, 2), self.prompts.pad_token_id, device=accelerator.current().device())
        self.model(input_ids=ids, use_cache=False)

    def _generation_config(self) -> Any:
        config = copy.deepcopy(self.model.generation_config)
        config.do_sample = False
        config.update(**self.settings.values)
        if config.eos_token_id is None:
            config.eos_token_id = self.prompts.stop_token_ids
        if config.pad_token_id is None:
            config.pad_token_id = self.prompts.pad_token_id
        if config.max_new_tokens is None:
            config.max_new_tokens = LONGEST_ANSWER
        config.max_length = None
        if not config.do_sample:  # transformers would warn that these have no effect
            config.temperature = config.top_p = config.top_k = config.min_p = config.typical_p = None
            config.epsilon_cutoff = config.eta_cutoff = None
        return config

    def _stops(self, further: Sequence[StoppingCriteria]) -> StoppingCriteriaList:
        """What ends an answer besides tokens and length."""
        from transformers import StoppingCriteriaList, StopStringCriteria

        stop = list(self.settings.stop)
        return StoppingCriteriaList([*([StopStringCriteria(self.prompts.tokenizer, stop)] if stop else []), *further])

    def _on_device(self, batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The inputs on the model's device; media in its dtype, times of videos in their own."""
        device = accelerator.current().device()
        dtype = self.model.dtype

        def moved(value: torch.Tensor) -> torch.Tensor:
            is_medium = value.is_floating_point() and value.dim() > 1
            return value.to(device=device, dtype=dtype if is_medium else None)

        return {key: moved(value) for key, value in batch.items()}

    def _read(self, ids: list[int], prompt_tokens: int) -> Answer:
        ends = self.end_ids
        at = next((number for number, token in enumerate(ids) if token in ends), None)
        count = len(ids) if at is None else at + 1
        text = self.prompts.tokenizer.decode(ids[:at], skip_special_tokens=True)
        finish: Literal["end", "stop", "length"] = "length" if at is None else "end"
        for stop in self.settings.stop:
            before, found, _ = text.partition(stop)
            if found:
                text, finish = before, "stop"
        if finish == "stop":
            count = len(_without_padding(ids[:count], self.config.pad_token_id))
        return Answer(text, prompt_tokens, count, finish)


def _streamer(tokenizer: Any, write: Callable[[str], None]) -> BaseStreamer:
    from transformers import TextStreamer

    class Streamer(TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            write(text)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)


def _without_padding(ids: list[int], pad: int) -> list[int]:
    count = len(ids)
    while count and ids[count - 1] == pad:
        count -= 1
    return ids[:count]
