"""How an answer is generated: the keys of transformers' GenerationConfig, those of older versions among them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from mindspeed_mm.configs.published import NoEffect, Refused
from mindspeed_mm.configs.scalars import read_int
from mindspeed_mm.configs.sections import Above0, Bool, Count, Float, Section, Size, Texts, given_values


def _read_ids(value: object) -> object:
    return [read_int(item) for item in (value if isinstance(value, list) else [value])] if value is not None else None


_UpTo1 = Annotated[Float, Field(gt=0, le=1)]
Ids = Annotated[list[int] | None, BeforeValidator(_read_ids)]

#: key → values that ask for nothing; others are refused with the reason
_NEUTRAL: Mapping[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(("constraints", "force_words_ids"), ((None, []), "transformers constrains beams no more")),
    "penalty_alpha": ((None, 0, 0.0), "transformers has no contrastive search any more"),
    "dola_layers": ((None,), "transformers has no DoLa decoding any more"),
    "low_memory": ((None, False), "it belongs to contrastive search, which transformers has no more"),
    "num_beam_groups": ((None, 1), "transformers has no groups of beams any more"),
    "diversity_penalty": ((None, 0, 0.0), "it belongs to groups of beams, which transformers has no more"),
    "num_return_sequences": ((None, 1), "a row has one answer"),
    "num_return_groups": ((None, 1), "a row has one answer"),
    "max_time": ((None,), "an answer must not depend on how fast the machine is; limit it by max_new_tokens"),
    "watermarking_config": ((None,), "answers are not watermarked"),
    "cache_config": ((None,), "caches have no configuration of their own"),
    "decoder_start_token_id": ((None,), "the model's own configuration says it"),
}
#: further keys, which change nothing in an answer's text: key → why
_IDLE: Mapping[str, str] = {
    **dict.fromkeys(
        ("output_attentions", "output_hidden_states", "output_scores", "output_logits", "return_dict_in_generate"),
        "an answer is its text: scores and states are not written",
    ),
    "return_legacy_cache": "the cache is not returned",
    **dict.fromkeys(
        ("num_assistant_tokens", "num_assistant_tokens_schedule", "max_matching_ngram_size"),
        "no second model guesses tokens",
    ),
    **dict.fromkeys(
        ("image_token_id", "video_token_id", "vision_start_token_id", "bos_token_id"),
        "the processor and config.json know the tokens",
    ),
    "split_batch": "prompts are answered --batch-size at a time",
    "max_length": "max_new_tokens counts the answer alone",
}
#: all keys that have no field here
KEYS_WITHOUT_FIELD = (*_NEUTRAL, *_IDLE)


class GenerationKeys(Section):
    """`generation_config`, `inference.generation`. An absent key is what the model's generation_config.json says."""

    max_new_tokens: Count | None = Field(None, description="longest answer in tokens; absent and nowhere else: 512")
    min_new_tokens: Size | None = Field(None, description="shortest answer in tokens")
    min_length: Size | None = Field(None, description="shortest prompt and answer together, in tokens")
    do_sample: Bool | None = Field(None, description="draw tokens at random; absent = the most likely one each time")
    temperature: Above0 | None = Field(None, description="divides the logits when tokens are drawn")
    top_p: _UpTo1 | None = Field(None, description="share of the probability that tokens are drawn from")
    top_k: Size | None = Field(None, description="number of tokens that are drawn from; 0 = all")
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = Field(
        None, description="least probability of a token that is drawn, as a share of the likeliest one's"
    )
    typical_p: _UpTo1 | None = Field(None, description="as top_p, of the most typical tokens")
    epsilon_cutoff: Annotated[Float, Field(ge=0, lt=1)] | None = Field(None, description="least probability of a token")
    eta_cutoff: Annotated[Float, Field(ge=0, lt=1)] | None = Field(None, description="the same, by the entropy")
    repetition_penalty: Above0 | None = Field(None, description="divides the score of tokens that were there")
    encoder_repetition_penalty: Above0 | None = Field(None, description="the same, of tokens of the prompt")
    no_repeat_ngram_size: Size | None = Field(None, description="no sequence of so many tokens comes twice; 0 = off")
    encoder_no_repeat_ngram_size: Size | None = Field(None, description="the same, of sequences of the prompt")
    bad_words_ids: list[list[int]] | None = Field(None, description="sequences of tokens that are never written")
    suppress_tokens: Ids = Field(None, description="tokens that are never written")
    begin_suppress_tokens: Ids = Field(None, description="tokens that no answer begins with")
    forced_bos_token_id: Size | None = Field(None, description="first token of every answer")
    forced_eos_token_id: Ids = Field(None, description="token at the end of the longest answers")
    exponential_decay_length_penalty: list[Float] | None = Field(
        None, description="[begin, factor]: from this token on, the end becomes likelier"
    )
    sequence_bias: list[Any] | None = Field(None, description="[[tokens], bias] pairs added to scores")
    guidance_scale: Float | None = Field(None, description="classifier-free guidance of the answer; 1 = none")
    renormalize_logits: Bool | None = Field(None, description="scores are normalised after all changes")
    remove_invalid_values: Bool | None = Field(None, description="NaN and infinite scores become finite ones")
    num_beams: Count | None = Field(None, description="beams of a beam search; 1 = none")
    early_stopping: Bool | None = Field(None, description="beam search ends with as many answers as beams")
    length_penalty: Float | None = Field(
        None, description="beam search: exponent of the length that scores are divided by"
    )
    use_cache: Bool | None = Field(None, description="keep keys and values of earlier tokens")
    kv_cache: Bool | None = Field(None, description="the same")
    cache_implementation: str | None = Field(None, description="transformers' name of the cache")
    prompt_lookup_num_tokens: Count | None = Field(None, description="tokens guessed by looking them up in the prompt")
    token_healing: Bool | None = Field(None, description="the prompt's last token may be extended")
    stop_strings: Texts = Field(None, description="texts that end an answer; they aren't part of it")
    eos_token_id: Ids = Field(None, description="tokens that end an answer")
    pad_token_id: Size | None = Field(None, description="token that shorter prompts of a batch begin with")

    def settings(self) -> dict[str, Any]:
        """Return what was given, as arguments of transformers' GenerationConfig."""
        given = {name: value for name, value in given_values(self).items() if value is not None}
        cache = given.pop("kv_cache", None)
        if cache is not None:
            given.setdefault("use_cache", cache)
        return given


def refused_keys(prefix: str) -> tuple[Refused, ...]:
    """Return what is refused among the keys that stand at a dotted path."""
    return tuple(
        Refused(f"{prefix}.{key}", functools.partial(_asks_for_something, neutral), f"{why}; remove it")
        for key, (neutral, why) in _NEUTRAL.items()
    )


def _asks_for_something(neutral: tuple[Any, ...], value: object) -> bool:
    return value not in neutral


def idle_keys(prefix: str) -> tuple[NoEffect, ...]:
    """Return why keys that stand at a dotted path have no effect."""
    neutral = NoEffect(rf"{re.escape(prefix)}\.({'|'.join(_NEUTRAL)})", "its value asks for nothing")
    return (neutral, *(NoEffect(rf"{re.escape(prefix)}\.{key}", why) for key, why in _IDLE.items()))
