"""Flags about the optimizer and its schedules."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mindspeed_mm.configs.flags.spec import flag, no_effect

_MUON = no_effect(ptd="the Megatron backend steps adam, adam8bit and sgd")


@dataclass(frozen=True)
class OptimizerArguments:
    """Optimizer."""

    optimizer: Annotated[
        Literal["adam", "adam8bit", "sgd", "muon"],
        flag(
            "adam is AdamW, and adamw a synonym; adam8bit is AdamW whose state has 8 bits a value (needs the extra "
            "quantization); muon (FSDP2 backend) orthogonalises the update of each whole weight "
            "matrix, and of each expert, and leaves embeddings, output layer, convolutions, biases and norms to AdamW",
            synonyms=(("adamw", "adam"), ("AdamW", "adam"), ("adamw8bit", "adam8bit"), ("adamw_8bit", "adam8bit")),
        ),
    ] = "adam"
    lr: Annotated[float | None, flag("highest learning rate", minimum=0)] = None
    weight_decay: Annotated[float, flag("weight decay, on parameters of two dimensions and more", minimum=0)] = 0.01
    start_weight_decay: Annotated[float | None, flag("weight decay at the start, when it grows", minimum=0)] = None
    end_weight_decay: Annotated[float | None, flag("weight decay at the end, when it grows", minimum=0)] = None
    weight_decay_incr_style: Annotated[Literal["constant", "linear", "cosine"], flag("how weight decay grows")] = (
        "constant"
    )
    adam_beta1: Annotated[float, flag("decay of the first moment", minimum=0, below=1)] = 0.9
    adam_beta2: Annotated[float, flag("decay of the second moment", minimum=0, below=1)] = 0.999
    adam_eps: Annotated[float, flag("added to the root of the second moment", above=0)] = 1e-08
    sgd_momentum: Annotated[float, flag("momentum of sgd", minimum=0)] = 0.9
    swap_optimizer: Annotated[
        bool,
        flag(
            "the optimizer's state (adam, sgd) lies in host memory and streams through the device in parts during a "
            "step; the values are those without the flag"
        ),
    ] = False
    swap_optimizer_times: Annotated[
        int, no_effect("--swap-optimizer moves a 64th of the state at a time")("parts of the state", minimum=1)
    ] = 16
    clip_grad: Annotated[float, flag("highest L2 norm of the gradient; 0 = measure only", minimum=0)] = 1.0
    weight_decay_exclude_modules: Annotated[
        list[str], flag("no weight decay where a parameter's name contains one of these")
    ] = field(default_factory=list)
    lr_scale_modules: Annotated[list[str], flag("lr-mult applies where a parameter's name contains one of these")] = (
        field(default_factory=list)
    )
    lr_mult: Annotated[float, flag("factor on the learning rate of lr-scale-modules", minimum=0)] = 1.0
    ema_decay: Annotated[
        float | None,
        flag(
            "highest decay of an exponential moving average of the weights, kept and exported beside them; 0 = none, "
            "absent = what model.json says",
            minimum=0,
            below=1,
            refused={"ptd": "averages are kept on the FSDP2 backend only; add --use-torch-fsdp2 or remove the flag"},
            harmless=(0.0,),
        ),
    ] = None
    optimizer_selection: Annotated[
        Literal["fused_torch_adamw", "fused_adamw"] | None,
        no_effect(ptd="Megatron-core's optimizer brings its own Adam")("PyTorch's fused AdamW"),
    ] = "fused_torch_adamw"
    check_for_nan_in_loss_and_grad: Annotated[
        bool,
        flag(
            "skip and count steps whose loss or gradient isn't finite; always on",
            spellings=("--check-for-nan-in-loss-and-grad",),
            off_spellings=("--no-check-for-nan-in-loss-and-grad",),
        ),
    ] = True
    matched_adamw_rms: Annotated[
        float,
        _MUON(
            "Muon: root mean square of a matrix's update divided by its learning rate; the default is about that of "
            "AdamW, whose lr and weight-decay are right then",
            above=0,
        ),
    ] = 0.2
    muon_momentum: Annotated[float, _MUON("Muon: Nesterov momentum of the matrices", minimum=0, below=1)] = 0.95
    ns_steps: Annotated[int, _MUON("Muon: Newton-Schulz steps of an orthogonalisation", minimum=1)] = 5


@dataclass(frozen=True)
class ScheduleArguments:
    """Learning-rate schedule."""

    min_lr: Annotated[float, flag("lowest learning rate of a decay", minimum=0)] = 0.0
    lr_decay_style: Annotated[Literal["constant", "linear", "cosine", "inverse-square-root", "WSD"], flag("decay")] = (
        "linear"
    )
    lr_decay_iters: Annotated[int | None, flag("steps until min-lr; absent = the whole run", minimum=1)] = None
    lr_decay_samples: Annotated[int | None, flag("rows until min-lr, with train-samples", minimum=1)] = None
    lr_warmup_fraction: Annotated[float | None, flag("warmup, as a share of the decay's steps", minimum=0, below=1)] = (
        None
    )
    lr_warmup_iters: Annotated[int, flag("warmup, in steps", minimum=0)] = 0
    lr_warmup_samples: Annotated[int, flag("warmup, in rows, with train-samples", minimum=0)] = 0
    lr_warmup_init: Annotated[float, flag("learning rate that warmup starts from", minimum=0)] = 0.0
    lr_wsd_decay_style: Annotated[
        Literal["exponential", "linear", "cosine", "minus_sqrt"], flag("WSD: shape of the final decay")
    ] = "exponential"
    lr_wsd_decay_iters: Annotated[int | None, flag("WSD: steps of the final decay", minimum=1)] = None
    lr_wsd_decay_samples: Annotated[int | None, flag("WSD: rows of the final decay, with train-samples", minimum=1)] = (
        None
    )
    warmup_ratio: Annotated[
        float | None,
        flag("another trainer's name for lr-warmup-fraction", refused="write --lr-warmup-fraction", harmless=(0.0,)),
    ] = None
    override_opt_param_scheduler: Annotated[
        bool, no_effect("the flags of this launch always set the schedule")("flags before the checkpoint's schedule")
    ] = False
    use_checkpoint_opt_param_scheduler: Annotated[
        bool,
        flag("the checkpoint's schedule before the flags", refused="the flags of this launch always set the schedule"),
    ] = False
