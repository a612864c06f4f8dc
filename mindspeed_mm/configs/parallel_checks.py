"""Which numbers of a model each parallelism must divide: one function for each check, on numbers alone.

Each returns sentences, none where the numbers fit; `sections.raise_all` raises them as one ConfigError. They are asked
twice: of config.json before torch is imported (`parallel_model.check_parallel_model`), and of the built model by the
planning functions of `parallel/`, which know models that config.json doesn't describe. `where` begins each sentence:
a file and its key, or the path of a module.

    problems = [
        *heads_over_ulysses(f"'{path}'", module.config.num_attention_heads, dims),
        *parts_over_tensor_ranks(f"'{path}'", layer.out_features, "output features", dims),
    ]
    raise_all(problems)
"""

from __future__ import annotations

import math

from mindspeed_mm.configs.dims import Dims


def heads_over_ulysses(where: str, heads: int, dims: Dims) -> list[str]:
    """Check that Ulysses ranks can share the attention heads of a tensor-parallel rank.

    Args:
        heads: number of query heads; key-value heads are repeated where there are fewer.
    """
    if heads % dims.tp or heads // dims.tp % dims.ulysses == 0:
        return []  # the former is reported by `parts_over_tensor_ranks`
    own = heads // dims.tp
    fitting = math.gcd(own, dims.cp)
    ring = dims.cp // fitting
    nearest = (
        f"--context-parallel-algo megatron_cp_algo, a ring of {ring}"
        if fitting == 1
        else f"--ulysses-degree-in-cp {fitting} with --context-parallel-algo hybrid_cp_algo, ring {ring}"
    )
    of_each = f", of which each tensor-parallel rank has {own}," if dims.tp > 1 else ""
    return [
        f"{where}: {heads} attention heads{of_each} can't be shared by {dims.ulysses} Ulysses ranks; nearest valid "
        f"with --context-parallel-size {dims.cp}: {nearest}"
    ]


def attention_in_ring(where: str, what: str, value: float | None, dims: Dims) -> list[str]:
    """Check that attention has nothing that a ring doesn't compute.

    Args:
        what: "dropout" of attention weights, or "a cap of its scores".
        value: of config.json; None or 0: it has none.
    """
    if dims.ring == 1 or not value:
        return []
    return [
        f"{where}: attention has {what} ({value:g}), which a ring doesn't compute; write 0 there, or choose "
        "--context-parallel-algo ulysses_cp_algo"
    ]


def experts_over_ranks(where: str, experts: int, dims: Dims) -> list[str]:
    """Check that expert-parallel ranks can share the experts of a layer.

    Args:
        experts: number of experts that tokens are routed to; 0: the model has none.
    """
    if dims.ep == 1:
        return []
    if not experts:
        return [
            f"{where}: there are no experts to be split over {dims.ep} expert-parallel ranks; remove "
            "--expert-model-parallel-size and fsdp2.yaml's expert_parallel_size, or write 1"
        ]
    if experts % dims.ep == 0:
        return []
    common = math.gcd(experts, dims.world_size // dims.pp)
    return [
        f"{where}: {experts} experts can't be shared by {dims.ep} expert-parallel ranks; valid here: "
        f"{_listed_divisors(common)}"
    ]


def expert_rows_over_shards(where: str, rows: int, dims: Dims) -> list[str]:
    """Check that the ranks that shard the same experts further can do so evenly.

    Args:
        rows: size of the dimension that is sharded, the second one of the experts' weights.
    """
    if dims.ep == 1 or rows % dims.ep_shard == 0:
        return []
    common = math.gcd(rows, dims.world_size // dims.pp // dims.ep)
    return [
        f"{where}: {rows} can't be sharded evenly by {dims.ep_shard} ranks that have the same experts; write "
        f"ep_fsdp_size in fsdp2.yaml, one of {_listed_divisors(common)}"
    ]


def parts_over_tensor_ranks(where: str, number: int, what: str, dims: Dims) -> list[str]:
    """Check that tensor-parallel ranks can share something evenly.

    Args:
        number: how many there are.
        what: their name in the plural: attention heads, key-value heads, features of the MLP, tokens of the vocabulary.
    """
    if number % dims.tp == 0:
        return []
    processes = dims.world_size // dims.pp
    return [
        f"{where}: {number} {what} can't be split over {dims.tp} tensor-parallel ranks; valid "
        f"--tensor-model-parallel-size here: {_listed_divisors(math.gcd(number, processes))}"
    ]


def _listed_divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
