"""The modules of a model whose computation is compiled, as fsdp2.yaml states."""

from __future__ import annotations

from torch import nn

from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.build_context import current_build_context
from mindspeed_mm.models.common.paths import listed_modules
from mindspeed_mm.models.transformers.inferred import block_lists
from mindspeed_mm.parallel.patterns import containing_path
from mindspeed_mm.utils.errors import ConfigError


def modules_to_compile(root: nn.Module, config: Fsdp2Config) -> dict[str, nn.Module]:
    """Return the modules that `compile` names, or all blocks.

    Args:
        root: the model; it may be on the meta device.
        config: content of fsdp2.yaml.

    Raises:
        ConfigError: a path matches nothing, or a module that holds blocks, or is in another one that is named.
    """
    if not config.compile:
        return {}
    lists = block_lists(root)
    where = f"{config.file}: compile"
    if config.compile is True:
        if not lists:
            raise ConfigError(f"{where}: {type(root).__name__} has no list of blocks; write a list of module paths")
        return listed_modules(root, config, "compile", [f"{path}.{{*}}" for path in lists])
    found = listed_modules(root, config, "compile", config.compile)
    for path in found:
        held = [blocks for blocks in lists if containing_path(blocks, [path]) is not None]
        if held:
            raise ConfigError(
                f"{where}: '{path}' holds blocks, which are compiled one by one, so that all share one function; write "
                + ", ".join(f"'{blocks}.{{*}}'" for blocks in held)
            )
        outer = containing_path(path.rpartition(".")[0], [other for other in found if other != path])
        if outer is not None:
            raise ConfigError(f"{where}: '{path}' is in '{outer}', which is compiled as a whole; remove one of the two")
    return found


def refuse_own_compile(name: str) -> None:
    """Refuse to compile a model with a `fully_shard` of its own, which doesn't compile its modules.

    Raises:
        ConfigError: the run asks for it.
    """
    config = current_build_context().fsdp2
    if config is not None and config.compile:
        raise ConfigError(
            f"{config.file}: compile (or --torch-compile): {name} has a fully_shard of its own, which doesn't compile "
            "its modules; leave it out, call torch.compile there, or let the class derive from FSDP2Mixin and keep its "
            "fully_shard"
        )
