"""Linear layers that multiply in float8: which of a model's, and their conversion by torchao.

Weights, gradients and activations keep their dtypes; the operands of the three products of a layer (output, gradient of
the input, gradient of the weight) are scaled and rounded to float8 for them. Source: torchao.float8.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from mindspeed_mm import accelerator
from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.models.common.paths import listed_modules
from mindspeed_mm.models.contract import as_trainable
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.patterns import containing_path
from mindspeed_mm.utils.dtypes import to_torch_dtype
from mindspeed_mm.utils.errors import ConfigError
from mindspeed_mm.utils.extras import require_extra
from mindspeed_mm.utils.log import notice

#: products of float8 matrices need sizes that are multiples of it
MULTIPLE = 16


def convert_to_float8(model: nn.Module, config: Fsdp2Config, dims: Dims) -> None:
    """Let linear layers of `model` multiply in float8, in place; names and parameters stay.

    Args:
        model: not wrapped yet; it may be on the meta device.

    Raises:
        ConfigError: see `float8_layers`; or torchao is missing, or this device has no such products.
    """
    chosen = float8_layers(model, config, dims)
    where = f"{config.file}: float8_recipe {config.float8_recipe}"
    why = accelerator.current().why_no_float8()
    if why is not None and not config.float8_emulate:
        raise ConfigError(
            f"{where} needs a device of NVIDIA's with compute capability 8.9 or more, and {why}; leave it out, or "
            "write float8_emulate: true, which gives the same numbers, slower"
        )
    require_extra("quantization", where)
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    assert config.float8_recipe is not None
    recipe = Float8LinearConfig.from_recipe_name(config.float8_recipe)
    recipe = replace(
        recipe,
        enable_fsdp_float8_all_gather=config.float8_all_gather,
        emulate=config.float8_emulate,
        pad_inner_dim=True,  # the number of tokens is the inner size of the weight's gradient
    )
    convert_to_float8_training(model, module_filter_fn=lambda module, path: path in chosen, config=recipe)


def float8_layers(model: nn.Module, config: Fsdp2Config, dims: Dims) -> set[str]:
    """Return the paths of the linear layers that multiply in float8.

    They are those of fsdp2.yaml's `float8_modules`, or of all blocks: not the first and last layers of the model. Those
    with a size that is no multiple of 16 are left out, those that the model's library keeps in float32, and modulation
    by the timestep (a linear layer inside of a norm), which has one row a sample.

    Raises:
        ConfigError: there are none, or the run has adapters, tensor parallelism or no 16-bit compute.
    """
    if config.float8_recipe is None:
        return set()
    _refuse_others(config, dims)
    patterns = config.float8_modules
    if patterns is None:
        patterns = [f"{path}.{{*}}" for path in block_lists(model)]
    inside = list(listed_modules(model, config, "float8_modules", patterns))
    dtype = to_torch_dtype(config.param_dtype)
    assert dtype is not None
    is_kept = as_trainable(model).keeps_in_float32(dtype)
    linears = {path: module for path, module in model.named_modules() if type(module) is nn.Linear}
    listed = {path: m for path, m in linears.items() if containing_path(path, inside) is not None}
    chosen = {
        path
        for path, linear in listed.items()
        if not any(size % MULTIPLE for size in linear.weight.shape)
        and not is_kept(f"{path}.weight")
        and not any("norm" in segment for segment in path.split("."))
    }
    if not chosen:
        raise ConfigError(
            f"{config.file}: float8_recipe {config.float8_recipe}: none of the {len(listed)} linear layers in "
            f"{', '.join(inside[:3]) or 'blocks'} has sizes that are multiples of {MULTIPLE}; leave it out"
        )
    notice(
        f"float8 ({config.float8_recipe}): {len(chosen)} of {len(linears)} linear layers; the others stay in "
        f"{config.param_dtype}, as do experts, which are no linear layers"
    )
    return chosen


def refuse_own_float8(name: str) -> None:
    """Refuse float8 for a model with a `fully_shard` of its own, which doesn't convert its layers.

    Raises:
        ConfigError: the run asks for it.
    """
    config = current_build_context().fsdp2
    if config is not None and config.float8_recipe is not None:
        raise ConfigError(
            f"{config.file}: float8_recipe {config.float8_recipe}: {name} has a fully_shard of its own, which doesn't "
            "convert its layers; leave it out, or let the class derive from FSDP2Mixin and keep its fully_shard"
        )


def _refuse_others(config: Fsdp2Config, dims: Dims) -> None:
    where = f"{config.file}: float8_recipe {config.float8_recipe}"
    if config.param_dtype not in ("bf16", "fp16"):
        raise ConfigError(
            f"{where}: param_dtype is {config.param_dtype or 'fp32'}, and what isn't multiplied in float8 is to be "
            "computed in 16 bits; write param_dtype: bf16"
        )
    if dims.tp > 1:
        raise ConfigError(
            f"{where}: --tensor-model-parallel-size is {dims.tp}, and layers that ranks split multiply in "
            f"{config.param_dtype}; set it to 1, or leave float8_recipe out"
        )
    if current_build_context().lora is not None:
        raise ConfigError(
            f"{where}: the run trains adapters (--lora-r), and layers with adapters multiply in {config.param_dtype}; "
            "leave float8_recipe out; --lora-quantize saves memory"
        )
