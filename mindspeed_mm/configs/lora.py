"""What a run trains by LoRA, from its flags."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_mm.configs.flags import LoraArguments
from mindspeed_mm.configs.flags.parsed import ParsedFlags, backend_of
from mindspeed_mm.utils.errors import did_you_mean

#: PEFT's `init_lora_weights` in words → --lora-init
_INIT = {"true": "kaiming", "kaiming": "kaiming", "gaussian": "gaussian", "false": "random", "random": "random"}
_FROM_BASE = ("corda", "eva", "loftq", "lora_ga", "olora", "orthogonal")


@dataclass(frozen=True)
class LoraOptions:
    """Adapters of a run; see the flags of the same names.

    Attributes:
        target_modules, target_parameters: what gets adapters, as written.
        apply_to: parts of the model that targets are looked for in; ("all",): the whole model.
        mixed_training: whether the other parts are trained whole.
        r: rank.
        alpha: numerator of the factor on an adapter's output.
        dropout: probability that an element of an adapter's input is zeroed.
        use_rslora: divide `alpha` by the root of the rank. Source: Kalajdzievski, arXiv:2312.03732.
        use_dora: train magnitudes apart. Source: Liu et al., arXiv:2402.09353.
        modules_to_save: what is trained whole and saved with the adapters.
        init: kaiming, gaussian or random.
        quantize: nf4: how frozen linear layers are stored; None: as they are computed.
        start: PEFT directory of the adapters that training starts from; None: new ones.
        base: folder of the base model's weights; None: --load or model.json names them.
    """

    target_modules: tuple[str, ...]
    target_parameters: tuple[str, ...] = ()
    apply_to: tuple[str, ...] = ("all",)
    mixed_training: bool = False
    r: int = 8
    alpha: float = 16
    dropout: float = 0.0
    use_rslora: bool = False
    use_dora: bool = False
    modules_to_save: tuple[str, ...] = ()
    init: str = "kaiming"
    quantize: str | None = None
    start: str | None = None
    base: str | None = None

    @property
    def scaling(self) -> float:
        """Factor on an adapter's output."""
        return self.alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def identity(self) -> dict[str, int | float]:
        """The settings without which trained adapters mean something else, by flag; they are kept in checkpoints."""
        alpha = int(self.alpha) if self.alpha == int(self.alpha) else self.alpha
        return {
            "lora_r": self.r,
            "lora_alpha": alpha,
            "lora_use_rslora": self.use_rslora,
            "lora_use_dora": self.use_dora,
        }


def lora_options(args: ParsedFlags) -> LoraOptions | None:
    """Return the adapters that the flags ask for; None: no LoRA."""
    modules, parameters = _words(args.lora_target_modules), _words(args.lora_target_parameters)
    if not modules and not parameters:
        return None
    return LoraOptions(
        target_modules=modules,
        target_parameters=parameters,
        apply_to=_words(args.lora_apply_modules),
        mixed_training=args.lora_mixed_training,
        r=args.lora_r,
        alpha=args.lora_alpha,
        dropout=args.lora_dropout,
        use_rslora=args.lora_use_rslora,
        use_dora=args.lora_use_dora,
        modules_to_save=_words(args.lora_modules_to_save),
        init=args.lora_init,
        quantize=args.lora_quantize,
        start=args.lora_load,
        base=args.load_base_model,
    )


def check_lora(args: ParsedFlags) -> list[str]:
    """Return a sentence for each flag about adapters that doesn't fit the others."""
    options = lora_options(args)
    if options is None:
        return _needs_targets(args)
    problems = []
    if options.target_parameters and options.dropout:
        problems.append(
            f"--lora-dropout {options.dropout:g}: adapters of parameters (--lora-target-parameters) have no input of "
            "their own to drop; write 0"
        )
    if options.target_parameters and options.use_dora:
        problems.append("--lora-use-dora: adapters of parameters (--lora-target-parameters) can't be DoRA's")
    if options.use_dora and options.init == "random":
        problems.append("--lora-init random: magnitudes of --lora-use-dora begin as the base model's; write kaiming")
    if options.mixed_training and "all" in options.apply_to:
        problems.append(
            "--lora-mixed-training needs --lora-apply-modules, the parts that get adapters while the others are trained"
        )
    if options.quantize is not None:
        problems += _check_quantized(args)
    return problems


def _check_quantized(args: ParsedFlags) -> list[str]:
    """Return a sentence for each flag that --lora-quantize can't be combined with."""
    flag = f"--lora-quantize {args.lora_quantize}"
    problems = []
    if backend_of(args) == "ptd":
        problems.append(f"{flag}: the Megatron backend has no layers in 4 bits; add --use-torch-fsdp2, or leave it out")
    if args.tensor_model_parallel_size > 1:
        problems.append(
            f"{flag}: layers in 4 bits are not split over tensor-parallel ranks; set --tensor-model-parallel-size to "
            "1, or leave it out"
        )
    if args.no_strict_load:
        problems.append(f"{flag}: a weight that is missing would have no value; leave --no-strict-load out")
    return problems


def _needs_targets(args: ParsedFlags) -> list[str]:
    default = LoraArguments()
    given = [
        name for name in vars(default) if name.startswith("lora_") and getattr(args, name) != getattr(default, name)
    ]
    given = [name for name in given if name != "lora_register_forward_hook"]
    given += ["load_base_model"] if args.load_base_model else []
    if not given:
        return []
    flags = ", ".join("--" + name.replace("_", "-") for name in given)
    return [
        f"{flags}: --lora-target-modules names the layers that get adapters (q_proj v_proj, or all-linear); without it "
        "there is no LoRA"
    ]


def lora_init(value: object) -> str:
    """Return the value of --lora-init that PEFT's `init_lora_weights` means.

    Args:
        value: true, false, or a name; as text, too.

    Raises:
        ValueError: it is unknown, or a method that computes the first adapters from the base model's weights.
    """
    word = str(value).strip().lower()
    if word in _INIT:
        return _INIT[word]
    expected = "expected true (kaiming), gaussian, or false (random, not the base model at first)"
    if word in _FROM_BASE or word.startswith("pissa"):
        raise ValueError(f"adapters that begin as parts of the base model's weights are not there; {expected}")
    raise ValueError(f"{expected}{did_you_mean(word, _INIT)}")


def _words(values: list[str]) -> tuple[str, ...]:
    """Split at commas outside of braces: published scripts join names by commas, and paths may hold `{1,3}`."""
    words: list[str] = []
    for value in values:
        depth, word = 0, ""
        for letter in value:
            depth += (letter == "{") - (letter == "}")
            if letter == "," and depth == 0:
                words.append(word)
                word = ""
            else:
                word += letter
        words.append(word)
    return tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
