"""The modules that are recomputed, whose activations are offloaded, or that run on chunks of their input."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from mindspeed_mm.configs.dims import Dims
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.models.common.block_parts import block_parts, has_experts
from mindspeed_mm.models.common.block_recompute import kept_by_flags, recompute_by_flags, recomputed_by_flags
from mindspeed_mm.models.common.build_context import BuildContext
from mindspeed_mm.models.common.compiled import modules_to_compile
from mindspeed_mm.models.common.paths import listed_modules
from mindspeed_mm.parallel.chunk_mbs import ChunkPlan
from mindspeed_mm.parallel.chunk_mlp import apply_chunked_mlp
from mindspeed_mm.parallel.offload import apply_offload
from mindspeed_mm.parallel.patterns import containing_path
from mindspeed_mm.utils.errors import ConfigError, did_you_mean
from mindspeed_mm.utils.log import notice


@dataclass(frozen=True)
class MemoryModules:
    """Modules of a model by path.

    Attributes:
        recomputed: their activations are recomputed in backward.
        kept: operations of recomputed modules whose outputs are kept.
        offloaded: what they keep for backward waits in host memory.
        chunked: they run on chunks of a micro-batch's rows.
        chunked_mlps: they run on parts of the tokens.
    """

    recomputed: dict[str, nn.Module]
    kept: tuple[str, ...]
    offloaded: dict[str, nn.Module]
    chunked: dict[str, nn.Module]
    chunked_mlps: dict[str, nn.Module]


def plan_memory(root: nn.Module, config: Fsdp2Config, dims: Dims, context: BuildContext) -> MemoryModules:
    """Return the modules that fsdp2.yaml's keys and the flags name.

    Args:
        root: the model; it may be on the meta device.
        config: content of fsdp2.yaml.
        dims: sizes of the parallelisms.
        context: the run, for its flags.

    Raises:
        ConfigError: a path matches nothing, a module with offload is a part of a recomputed or compiled one, one that
            runs on chunks of rows isn't recomputed, context-parallel ranks split these rows, or what is to be kept is
            changed in place.
    """
    offloaded, chunked, named = (
        listed_modules(root, config, key)
        for key in ("activation_offload_modules", "chunk_mbs_modules", "recompute_modules")
    )
    flagged = recomputed_by_flags(root, config, context.recompute)
    recomputed = {**named, **flagged}
    kept = [*config.recompute_keep] * bool(recomputed) + [*kept_by_flags(context.recompute)] * bool(flagged)
    _require_recompute(chunked, recomputed, f"{config.file}: chunk_mbs_modules")
    _refuse_parts_of_recomputed(offloaded, recomputed, f"{config.file}: activation_offload_modules")
    if "attention" in kept and dims.ring > 1:
        raise ConfigError(
            f"{config.file}: recompute_keep: attention (or --recompute-skip-core-attention): a ring of {dims.ring} "
            "context-parallel ranks merges the results of its kernels in place, so that they can't be kept; leave it "
            "out, or write --context-parallel-algo ulysses_cp_algo"
        )
    if context.swap_attention:
        offloaded |= _swapped_attention(root, recomputed)
    if chunked and dims.cp > 1:
        raise ConfigError(
            f"{config.file}: chunk_mbs_modules splits the rows of a micro-batch, whose tokens --context-parallel-size "
            f"{dims.cp} splits over ranks all at once; remove one of the two"
        )
    outermost = {path: m for path, m in offloaded.items() if not _parts_of(path, offloaded)}
    mlps = mlps_to_chunk(root, config, context)
    _refuse_parts_of_compiled(root, config, {**outermost, **mlps, **recomputed}, kept)
    return MemoryModules(recomputed, tuple(dict.fromkeys(kept)), outermost, chunked, mlps)


def mlps_to_chunk(root: nn.Module, config: Fsdp2Config, context: BuildContext) -> dict[str, nn.Module]:
    """Return the MLPs that run on parts of the tokens; arguments are those of `plan_memory`.

    Raises:
        ConfigError: one of them has experts, there is none, or the outputs of its products are to be kept.
    """
    where = f"{config.file}: chunk_mlp_modules"
    if _mlp_tokens(config, context) is None:
        if config.chunk_mlp_modules:
            raise ConfigError(f"{where}: they run on all tokens at once without 'chunk_mlp_tokens'; write it, too")
        return {}
    if config.chunk_mlp_modules is None:
        found = block_parts(root, "mlp")
        if not found:
            raise ConfigError(
                f"{_mlp_tokens_word(config)}: no MLP without experts was found in the blocks of {type(root).__name__}; "
                "write its path in chunk_mlp_modules, or remove it"
            )
    else:
        found = listed_modules(root, config, "chunk_mlp_modules")
    for path, module in found.items():
        if has_experts(module):
            raise ConfigError(
                f"{where}: '{path}' ({type(module).__name__}) has experts, to which it sends tokens itself; MLPs "
                "without experts run on parts of the tokens; leave it out"
            )
    if "linear" in config.recompute_keep:
        raise ConfigError(
            f"{config.file}: 'recompute_keep' keeps the outputs of linear layers, and {_mlp_tokens_word(config)} those "
            "of few tokens only; remove one of the two"
        )
    return found


def run_mlps_on_parts(root: nn.Module, config: Fsdp2Config, context: BuildContext) -> None:
    """Let MLPs run on parts of the tokens, as fsdp2.yaml or the flag says; arguments are those of `plan_memory`."""
    tokens = _mlp_tokens(config, context)
    found = mlps_to_chunk(root, config, context)
    if tokens is not None:
        apply_chunked_mlp(found, tokens, _mlp_tokens_word(config))


def apply_memory_flags(root: nn.Module, config: Fsdp2Config, context: BuildContext) -> None:
    """Apply the flags that save memory of activations to a model that shards itself; see `plan_memory`."""
    if context.chunk_mlp_tokens is not None:
        run_mlps_on_parts(root, config, context)
    recompute_by_flags(root, config, context.recompute)
    if context.swap_attention:
        apply_offload(_swapped_attention(root, recomputed_by_flags(root, config, context.recompute)))


def _mlp_tokens(config: Fsdp2Config, context: BuildContext) -> int | None:
    return config.chunk_mlp_tokens or context.chunk_mlp_tokens


def _mlp_tokens_word(config: Fsdp2Config) -> str:
    return "--chunk-mlp-tokens" if config.chunk_mlp_tokens is None else f"{config.file}: chunk_mlp_tokens"


def _swapped_attention(root: nn.Module, recomputed: Collection[str]) -> dict[str, nn.Module]:
    """Return the attention of the blocks that aren't recomputed; where there is none, say why."""
    attention = block_parts(root, "attention")
    swapped = {path: module for path, module in attention.items() if not _parts_of(path, recomputed)}
    if not attention:
        notice(
            f"--swap-attention has no effect here: no attention was found in the blocks of {type(root).__name__}; name "
            "it in fsdp2.yaml's activation_offload_modules"
        )
    elif not swapped:
        notice(
            "--swap-attention has no effect here: all blocks are recomputed, and keep nothing of their attention; name "
            "them in fsdp2.yaml's activation_offload_modules, for their inputs"
        )
    return swapped


def _parts_of(path: str, paths: Collection[str]) -> str | None:
    """Return the innermost of `paths` whose module contains the one at `path`; None: it is in none of them."""
    return containing_path(path, [other for other in paths if other != path])


def _require_recompute(modules: Collection[str], recomputed: Collection[str], where: str) -> None:
    """
    Raises:
        ConfigError: one of the modules isn't recomputed.
    """
    kept = [path for path in modules if path not in recomputed]
    if kept:
        rest = f" and {len(kept) - 1} others" if len(kept) > 1 else ""
        raise ConfigError(
            f"{where}: '{kept[0]}'{rest} is not recomputed, so that it would keep the activations of all its parts; "
            f"name the same modules in recompute_modules{did_you_mean(kept[0], recomputed)}"
        )


def _refuse_parts_of_recomputed(modules: Collection[str], recomputed: Collection[str], where: str) -> None:
    """
    Raises:
        ConfigError: one of the modules is a part of a recomputed one, which keeps nothing of its parts.
    """
    for path in modules:
        whole = _parts_of(path, recomputed)
        if whole is not None:
            raise ConfigError(
                f"{where}: '{path}' is a part of '{whole}', which is recomputed and keeps its input only; name "
                f"'{whole}' here, or leave it out of what is recomputed"
            )


def chunk_plan(config: Fsdp2Config) -> ChunkPlan:
    """Return how fsdp2.yaml splits the inputs of `chunk_mbs_modules`."""
    return ChunkPlan(
        config.chunk_mbs_size,
        config.chunk_mbs_batch_dim,
        tuple(config.chunk_mbs_args),
        tuple(config.chunk_mbs_kwargs),
        config.file,
    )


def _refuse_parts_of_compiled(
    root: nn.Module, config: Fsdp2Config, modules: Collection[str], kept: Collection[str]
) -> None:
    """
    Raises:
        ConfigError: a module is inside of a compiled one, or a recomputed one that is compiled is to keep outputs.
    """
    compiled = modules_to_compile(root, config) if modules else {}
    for path in modules:
        whole = _parts_of(path, compiled)
        if whole is not None or (kept and path in compiled):
            what = f"'{path}' in it" if whole is not None else f"what it keeps ({', '.join(kept)})"
            raise ConfigError(
                f"{config.file}: compile (or --torch-compile): '{whole or path}' is compiled as a whole, and {what} is "
                "to be recomputed, offloaded or chunked by itself; leave compile out, or name whole blocks"
            )
