"""Every key of fsdp2.yaml, by what it does to a sharded model; each test fails when its key is ignored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch
import yaml
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from mindspeed_mm.backends import fsdp2 as backend_module
from mindspeed_mm.backends.fsdp2 import FSDP2Backend
from mindspeed_mm.configs.flags.model import PrecisionArguments
from mindspeed_mm.configs.fsdp2_config import Fsdp2Config
from mindspeed_mm.parallel import fsdp2
from mindspeed_mm.parallel.meshes import ParameterMeshes
from mindspeed_mm.utils.errors import ConfigError
from tests.support import toy_shards as toy
from tests.support.runs import run_of
from tests.support.toy_shards import BLOCKS, SIZE, Toy
from tests.support.workers import RankPool

IN_ORDER_OF_EXECUTION = ["vision.blocks.0", "vision.blocks.1", "language.blocks.0", "language.blocks.1"]
Content = dict[str, Any]
_T = TypeVar("_T")

COVERED: set[str] = set()


def covers(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Name the keys that a test would miss."""
    COVERED.update(keys)
    return lambda test: test


def test_every_key_has_a_test() -> None:
    assert set(Fsdp2Config.model_fields) == COVERED


class Ranks:
    """What ranks see of files with these contents."""

    def __init__(self, folder: Path, request: pytest.FixtureRequest) -> None:
        self._folder, self._request, self._written = folder, request, 0

    def write(self, content: Content) -> str:
        """Write an fsdp2.yaml; sharded over all ranks unless it says otherwise (None: it says nothing)."""
        self._written += 1
        path = self._folder / str(self._written) / "fsdp2.yaml"
        path.parent.mkdir()
        content = {"sharding_size": "auto", **content}
        path.write_text(yaml.safe_dump({key: value for key, value in content.items() if value is not None}))
        return str(path)

    def see(
        self, see: Callable[..., _T], *contents: Content, number: int = 2, args: tuple[Any, ...] = ()
    ) -> list[list[_T]]:
        """Of each content what each of `number` ranks sees, in one go."""
        pool: RankPool = self._request.getfixturevalue(f"ranks{number}")
        found = pool.run(toy.each, see, [self.write(content) for content in contents], *args)
        return [list(ranks) for ranks in zip(*found, strict=True)]

    def first(self, see: Callable[..., _T], *contents: Content, args: tuple[Any, ...] = ()) -> list[_T]:
        """Of each content what rank 0 of two sees."""
        return [zero for zero, _ in self.see(see, *contents, args=args)]


@pytest.fixture
def ranks(tmp_path: Path, request: pytest.FixtureRequest) -> Ranks:
    return Ranks(tmp_path, request)


# --- how many ranks share a copy


@covers("sharding_size")
def test_sharding_size(ranks: Ranks) -> None:
    sizes = {None: ((2, 1), 8), 1: ((2, 1), 8), 2: ((2,), 4), "auto": ((2,), 4)}
    seen = ranks.see(toy.shards, *({"sharding_size": size} for size in sizes))
    for (zero, one), (mesh, held) in zip(seen, sizes.values(), strict=True):
        assert zero == (mesh, list(range(held)))
        assert one == (mesh, list(range(SIZE))[-held:])


@covers("sharding_size")
def test_sharding_size_of_half_the_ranks(ranks: Ranks) -> None:
    """Neighbours share a copy; ranks 0 and 2 hold the same part."""
    (found,) = ranks.see(toy.shards, {"sharding_size": 2}, number=4)
    assert [mesh for mesh, _ in found] == [(2, 2)] * 4
    assert [values for _, values in found] == [[0, 1, 2, 3], [4, 5, 6, 7]] * 2


@covers("sharding_size", "reshard_after_forward")
def test_sizes_that_do_not_divide(ranks: Ranks) -> None:
    sizes, resharded = ranks.see(toy.refusal, {"sharding_size": 3}, {"reshard_after_forward": 3}, number=4)
    for message in sizes:
        assert "sharding_size is 3" in message and "valid here: auto, 1, 2, 4" in message
    for message in resharded:
        assert "reshard_after_forward is 3" in message and "valid here: true, false, 2, 4" in message


# --- which modules are units, ignored, recomputed


@covers("sub_modules_to_wrap")
def test_sub_modules_to_wrap(ranks: Ranks) -> None:
    """The units are those named and the root; a parent that is named before its children leaves them theirs."""
    every = sorted(name for name, _ in Toy().named_parameters())
    none, some = ranks.first(toy.units, {}, {"sub_modules_to_wrap": ["vision", "vision.blocks.{*}"]})
    assert none == {"": every}
    assert some == {
        "": [n for n in every if n.startswith("language")],
        "vision": ["vision.stem.weight"],
        "vision.blocks.0": ["vision.blocks.0.weight"],
        "vision.blocks.1": ["vision.blocks.1.weight"],
    }


@covers("ignored_modules")
def test_ignored_modules(ranks: Ranks) -> None:
    """Parameters of an ignored module stay plain and whole, the others are sharded."""
    ignored = {"sub_modules_to_wrap": BLOCKS, "ignored_modules": ["vision.stem"]}
    (all_sharded, _), some = ranks.see(toy.parameters, {}, ignored)
    assert set(all_sharded.values()) == {4}
    for found in some:
        assert found.pop("vision.stem.weight") is None
        assert set(found.values()) == {4}


IGNORED = ["vision.stem", "language.blocks"]  # the second is a list: its elements are called


@covers("ignored_modules")
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize("number", [1, 2])
def test_ignored_modules_compute_and_train_as_the_others_do(ranks: Ranks, number: int, frozen: bool) -> None:
    """In bf16 over whole float32 weights, with the gradients of a run that ignores nothing."""
    for size in range(1, number + 1):
        bf16 = {"param_dtype": "bf16", "sharding_size": size, "sub_modules_to_wrap": BLOCKS}
        ignored = [IGNORED, [""]] if size == 2 else [IGNORED]  # the second is the whole model
        contents = [bf16, *({**bf16, "ignored_modules": paths} for paths in ignored)]
        expected, *found = ranks.see(toy.bf16_step, *contents, number=number, args=(frozen,))
        for own in found:
            for (seen, gradients, weights), (_, expected_gradients, _) in zip(own, expected, strict=True):
                assert seen == {(torch.bfloat16, torch.bfloat16)}
                assert all(w.dtype == torch.float32 and bool((w == 1.003).all()) for w in weights)
                if frozen:
                    assert gradients == [None] * 3
                else:
                    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-6, atol=0)


@covers("recompute_modules")
def test_recompute_modules(ranks: Ranks) -> None:
    """A named block runs twice a step, the others once."""
    wrapped = {"sub_modules_to_wrap": BLOCKS}
    none, some = ranks.first(toy.runs_in_a_step, wrapped, {**wrapped, "recompute_modules": ["vision.blocks.{*}"]})
    assert set(none.values()) == {1}
    assert some == {name: 1 + name.startswith("vision.blocks") for name in none}


@covers("ignore_missing_modules")
def test_ignore_missing_modules(ranks: Ranks) -> None:
    """An entry that only saves memory may match nothing; one that changes what is trained may not."""
    missing = {"sub_modules_to_wrap": BLOCKS, "recompute_modules": ["vision.blocks.{*}", "mtp.{*}"]}
    (runs,) = ranks.first(toy.runs_in_a_step, {**missing, "ignore_missing_modules": True})
    assert runs == {name: 1 + name.startswith("vision.blocks") for name in runs}
    ignored = {"ignored_modules": ["mtp"], "ignore_missing_modules": True}
    for message, key in zip(ranks.first(toy.refusal, missing, ignored), ("recompute", "ignored"), strict=True):
        assert f"fsdp2.yaml: {key}_modules: " in message and "mtp" in message


@covers(
    "activation_offload_modules",
    "chunk_mbs_modules",
    "chunk_mbs_size",
    "chunk_mbs_batch_dim",
    "chunk_mbs_args",
    "chunk_mbs_kwargs",
)
def test_inputs_in_host_memory_and_chunks_of_rows(ranks: Ranks) -> None:
    """Neither gathers or reduces anything more; offload changes no bit."""
    blocks, rows = ["vision.blocks.{*}"], 3
    base = {"sub_modules_to_wrap": BLOCKS, "recompute_modules": blocks}
    chunks = {**base, "chunk_mbs_modules": blocks, "chunk_mbs_kwargs": ["shift"], "chunk_mbs_args": [0]}
    offload = {"activation_offload_modules": blocks}
    found = ranks.first(
        toy.memory_of_a_step,
        base,
        {**base, **offload},
        chunks,
        {**chunks, **offload, "chunk_mbs_size": 2},
        {**chunks, "chunk_mbs_batch_dim": 1},
        args=(rows,),
    )
    (plain, expected), *others, (by_other_rows, _) = found
    assert plain["runs"] == 2 and plain["copies"] == [] and by_other_rows["runs"] == 2 * rows
    two_and_one = [2 * SIZE, SIZE]  # elements of the chunks; the last one of all has not left when backward begins
    for (counts, values), runs, copies in zip(
        others, (1, rows, 2), ([rows * SIZE] * 3, [], [*two_and_one * 3, 2 * SIZE]), strict=True
    ):
        assert counts == {**plain, "runs": 2 * runs, "copies": copies}
        torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)
    assert all(torch.equal(a, b) for a, b in zip(others[0][1], expected, strict=True))


@covers("activation_offload_modules", "chunk_mbs_modules")
@pytest.mark.parametrize(
    ("key", "paths", "refusal"),
    [
        ("chunk_mbs_modules", ["vision.blocks.{*}"], "'vision.blocks.1' is not recomputed"),
        ("activation_offload_modules", ["language", "vision.blocks.{0}"], "'vision.blocks.0' is a part of 'vision'"),
    ],
)
def test_what_is_saved_of_recomputed_modules(ranks: Ranks, key: str, paths: list[str], refusal: str) -> None:
    recomputed = "vision" if key == "activation_offload_modules" else "vision.blocks.{0}"
    one = {"recompute_modules": [recomputed]}
    refused, missing = ranks.first(toy.refusal, {**one, key: paths}, {**one, key: ["vision.block.{*}"]})
    assert f"fsdp2.yaml: {key}: {refusal}" in refused
    assert f"fsdp2.yaml: {key}: " in missing and "vision.blocks" in missing


@covers("chunk_mlp_tokens", "chunk_mlp_modules")
def test_parts_of_the_tokens(ranks: Ranks) -> None:
    blocks = {"sub_modules_to_wrap": BLOCKS}
    parts = {**blocks, "chunk_mlp_modules": ["language.blocks.{*}"]}
    found = ranks.first(toy.language_of_a_step, blocks, *({**parts, "chunk_mlp_tokens": n} for n in (2, 3)), args=(3,))
    (runs, expected), (in_two, values), (in_one, same) = found
    assert (runs, in_two, in_one) == (1, 4, 1)  # two parts, forward and again in backward
    assert len(expected) > 4 and all(torch.equal(a, b) for a, b in zip(same, expected, strict=True))
    torch.testing.assert_close(values, expected, rtol=1e-6, atol=1e-6)


@covers("compile", "compile_backend")
def test_which_blocks_are_compiled(ranks: Ranks) -> None:
    """That numbers stay is tested by `tests/parity/test_compile.py`."""
    contents = [{"compile": ["language.block.{*}"]}, {"compile": True, "compile_backend": "eager"}]
    missing, unknown = ranks.first(toy.refusal, *({"sub_modules_to_wrap": BLOCKS, **keys} for keys in contents))
    assert "fsdp2.yaml: compile: " in missing and "language.blocks" in missing
    assert "'compile_backend' is 'eager'; expected one of inductor, aot_eager" in unknown


@covers("use_reentrant", "recompute_keep")
def test_use_reentrant(ranks: Ranks) -> None:
    """Each value takes the other one of torch's two implementations; outputs are kept by one alone."""
    content = {"sub_modules_to_wrap": BLOCKS, "recompute_modules": BLOCKS}
    given = [{}, {"use_reentrant": True}, {"use_reentrant": False}, {"recompute_keep": ["linear"]}]
    default, asked, *refused = ranks.first(toy.made_by, *({**content, **keys} for keys in given))
    assert default == asked == ["CheckpointFunctionBackward"] * 2
    assert all(len(names) == 2 and "CheckpointFunctionBackward" not in names for names in refused)


@covers("use_reentrant")
def test_r01_reentrant_recompute_above_a_frozen_module(ranks: Ranks) -> None:
    """R01: the first block's inputs need no gradient; its parameters get theirs all the same, and one notice says
    how."""
    content = {"sub_modules_to_wrap": BLOCKS}
    recomputed = {**content, "recompute_modules": BLOCKS, "use_reentrant": True}
    (expected, silence), (found, lines) = ranks.first(toy.gradients_above_a_frozen_stem, content, recomputed)
    assert silence == []
    assert expected.pop("vision.stem.weight") is None and found.pop("vision.stem.weight") is None
    for name, gradient in expected.items():
        assert gradient is not None and gradient.abs().sum() > 0
        assert torch.equal(found[name], gradient), name
    (line,) = lines
    assert "use_reentrant: true" in line and "vision.blocks.0" in line


# --- types

FP32, HALF = torch.float32, torch.bfloat16
#: keys of the file → types that a block computes with
TYPES: list[tuple[Content, Mapping[str, torch.dtype]]] = [
    ({}, {"inputs": FP32, "weights": FP32, "output": FP32}),
    ({"param_dtype": "bf16"}, {"inputs": HALF, "weights": HALF, "output": HALF}),
    ({"param_dtype": "fp16"}, dict.fromkeys(("inputs", "weights", "output"), torch.float16)),
    ({"param_dtype": "bf16", "output_dtype": "fp32"}, {"weights": HALF, "output": FP32}),
    ({"param_dtype": "bf16", "cast_forward_inputs": True}, {"inputs": HALF, "weights": HALF}),
    ({"param_dtype": "bf16", "cast_forward_inputs": False}, {"inputs": FP32, "weights": HALF}),
]


@covers("param_dtype", "output_dtype", "cast_forward_inputs")
def test_types(ranks: Ranks) -> None:
    """What blocks compute with; parameters and gradients that the optimizer sees stay float32."""
    seen = ranks.first(toy.dtypes, *({"sub_modules_to_wrap": BLOCKS, **keys} for keys, _ in TYPES))
    for found, (keys, expected) in zip(seen, TYPES, strict=True):
        assert found == {**found, **expected, "parameter": FP32, "gradient": FP32}, keys


#: keys of the file → whether gradients of a step, which bf16 can't hold, are exact
REDUCED: list[tuple[Content, bool]] = [
    ({}, True),
    ({"reduce_dtype": "bf16"}, False),
    ({"param_dtype": "bf16"}, True),
    ({"param_dtype": "bf16", "reduce_dtype": "fp32"}, True),
    ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, False),
]


@covers("reduce_dtype")
@pytest.mark.parametrize("sharding_size", [1, 2])
def test_reduce_dtype(ranks: Ranks, sharding_size: int) -> None:
    seen = ranks.see(toy.gradient_of_256_and_1, *({"sharding_size": sharding_size, **keys} for keys, _ in REDUCED))
    for gradients, (keys, exact) in zip(seen, REDUCED, strict=True):
        for gradient in gradients:
            assert (gradient == 257) == exact, keys
            assert gradient in (256, 257, 258), keys


@covers("reduce_dtype", "defer_gradient_sync")
def test_gradients_of_micro_batches_are_summed_in_fp32(ranks: Ranks) -> None:
    """By HSDP and where the sum is deferred; with reduce_dtype bf16 they are not."""
    deferred = {"param_dtype": "bf16", "sharding_size": 2, "defer_gradient_sync": True}
    contents = [{"param_dtype": "bf16", "sharding_size": 1}, deferred, {**deferred, "reduce_dtype": "bf16"}]
    norms = ranks.first(toy.norms_over_micro_batches, *contents)
    hsdp, exact, rounded = (abs(norm / expected - 1) for norm, expected in norms)
    assert hsdp < 1e-6 and exact < 1e-6 and 1e-4 < rounded < 1e-2


@covers("reduce_dtype")
def test_the_flag_for_fp32_gradients_refuses_another_reduce_dtype() -> None:
    flags = PrecisionArguments(bf16=True, accumulate_allreduce_grads_in_fp32=True)
    for fits in (None, "fp32"):
        assert backend_module.with_precision(Fsdp2Config(reduce_dtype=fits), flags).param_dtype == "bf16"
    with pytest.raises(ConfigError, match=r"in-fp32: fsdp2.yaml's reduce_dtype is bf16; write reduce_dtype: fp32, or"):
        backend_module.with_precision(Fsdp2Config(reduce_dtype="bf16"), flags)


# --- memory


@covers("reshard_after_forward")
def test_reshard_after_forward(ranks: Ranks) -> None:
    """What four ranks hold of a parameter between its forward and its backward pass."""
    held = {None: 2, True: 2, False: 8, 2: 4, 4: 2}
    contents = [{"sub_modules_to_wrap": BLOCKS, "reshard_after_forward": value} for value in held]
    seen = ranks.see(toy.kept_after_forward, *contents, number=4)
    assert seen == [[(2, elements, 2)] * 4 for elements in held.values()]


@covers("offload_to_cpu")
def test_offload_to_cpu(ranks: Ranks) -> None:
    """Every unit gets the offload policy, and a model built on meta gets its parameters on the host."""
    contents = [{"sub_modules_to_wrap": BLOCKS, **keys} for keys in ({}, {"offload_to_cpu": True})]
    policies = [[OffloadPolicy.__name__] * 5, [CPUOffloadPolicy.__name__] * 5]
    assert ranks.first(toy.offload_policies, *contents) == policies
    devices = [["cuda:0", "cuda:0", "cuda:0"], ["cpu", "cuda:0"]]
    assert ranks.first(toy.devices_of_a_model_from_meta, *contents) == devices


@covers("offload_to_cpu")
@pytest.mark.parametrize("offload", [False, True])
def test_offload_to_cpu_needs_a_group_for_host_tensors(ranks: Ranks, offload: bool) -> None:
    run = run_of(
        use_torch_fsdp2=True,
        fsdp2_config_path=ranks.write({"offload_to_cpu": offload}),
        distributed_backend="nccl",
        distributed_timeout_minutes=1,
    )
    with (
        mock.patch.object(backend_module, "start_world", side_effect=InterruptedError) as start,
        pytest.raises(InterruptedError),
    ):
        FSDP2Backend().setup(run)
    assert start.call_args.kwargs == {"timeout_minutes": 1, "needs_cpu_tensors": offload}


@covers("pin_memory")
def test_pin_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned where there is an accelerator, if parameters are offloaded at all."""
    mesh: Any = SimpleNamespace(ndim=1, size=lambda dim=0: 2)
    monkeypatch.setattr(fsdp2.accelerator, "current", lambda: SimpleNamespace(is_host=False))
    for pin in (False, True):
        config = Fsdp2Config.from_dict({"offload_to_cpu": True, "pin_memory": pin})
        policy = fsdp2.build_shard_plan(config, ParameterMeshes(mesh), set()).offload_policy
        assert isinstance(policy, CPUOffloadPolicy)
        assert policy.pin_memory is pin


# --- overlap


def ahead(order: list[str], number: int) -> dict[str, list[str]]:
    return {name: order[i + 1 : i + 1 + number] for i, name in enumerate(order)} if number else {}


@covers("num_to_forward_prefetch", "num_to_backward_prefetch")
def test_prefetch_follows_the_order_of_execution(ranks: Ranks) -> None:
    """Without the keys none forward on the host and one on a device, and torch's own one backward."""
    numbers = {(None, None): (0, 1), **{given: given for given in [(0, 0), (1, 0), (2, 0), (0, 2), (2, 3)]}}
    keys = [{"num_to_forward_prefetch": forward, "num_to_backward_prefetch": backward} for forward, backward in numbers]
    seen = ranks.first(toy.prefetched, *({"sub_modules_to_wrap": BLOCKS, **content} for content in keys))
    for found, (forward, backward) in zip(seen, numbers.values(), strict=True):
        assert found == (ahead(IN_ORDER_OF_EXECUTION, forward), ahead(IN_ORDER_OF_EXECUTION[::-1], backward))
    blocks = {"sub_modules_to_wrap": BLOCKS}
    keys = [{**blocks, "num_to_forward_prefetch": forward} for forward in (None, 0, 2)]
    for found, forward in zip(ranks.first(toy.gathers_in_forward, *keys), (1, 0, 2), strict=True):
        assert found == [1 + min(i + 1 + forward, len(IN_ORDER_OF_EXECUTION)) for i in range(4)]  # and the model itself


@covers("defer_gradient_sync")
@pytest.mark.parametrize("sharding_size, replicas", [("auto", 0), (2, 1)], ids=["sharded", "HSDP"])
def test_defer_gradient_sync(ranks: Ranks, sharding_size: Any, replicas: int) -> None:
    """5 units and 3 micro-batches: reductions once a micro-batch, or once a step; replicas meet once a step anyway."""
    content = {"sharding_size": sharding_size, "sub_modules_to_wrap": BLOCKS}
    times = {None: 3, False: 3, True: 1}
    contents = [{**content, "defer_gradient_sync": deferred} for deferred in times]
    seen = ranks.see(toy.collectives_of_a_step, *contents, number=4, args=(3,))
    assert seen == [[(5 * number, 5 * replicas, 4 * 3.0)] * 4 for number in times.values()]


# --- keys without effect, said once by one rank (experts and layers of a model that has some: test_experts.py,
# test_tensor.py)

WITHOUT_EFFECT: dict[str, Any] = {
    "moe_modules": ["language.blocks.{*}"],
    "reshard_local_experts": False,
    "ep_fsdp_size": 1,
    "align_fsdp_param_groups": True,
    "tp_colwise": ["language.blocks.{*}"],
    "tp_rowwise": ["language.blocks.{*}"],
    "cp_split_media": False,
}
PINNED = {"offload_to_cpu": True, "pin_memory": True}


@covers(*WITHOUT_EFFECT, "pin_memory", "expert_parallel_size")
def test_keys_without_effect_are_said_once(ranks: Ranks) -> None:
    contents = [{key: value} for key, value in WITHOUT_EFFECT.items()] + [PINNED, {"pin_memory": True}]
    expected = [[f"'{key}' has no effect", "fsdp2.yaml"] for key in WITHOUT_EFFECT]
    expected += [["pin_memory has no effect here"], ["pin_memory", "without offload_to_cpu: true"]]
    silent = [{"offload_to_cpu": True}, {"expert_parallel_size": 1}]
    seen = ranks.see(toy.said, *contents, *silent)
    for (zero, one), words in zip(seen, [*expected, *([] for _ in silent)], strict=True):
        assert one == [] and len(zero) == bool(words)
        assert all(word in line for line in zero for word in words), zero


@covers("expert_parallel_size")
def test_a_model_without_experts_refuses_expert_parallelism(ranks: Ranks) -> None:
    for message in ranks.see(toy.refusal, {"expert_parallel_size": 2})[0]:
        assert "expert_parallel_size is 2, but Toy has no experts" in message and "write 1" in message


@covers("float8_recipe", "float8_modules", "float8_all_gather", "float8_emulate")
def test_a_model_without_fitting_linear_layers_refuses_float8(ranks: Ranks) -> None:
    """What the keys do is in tests/distributed/test_float8.py and tests/unit/models/test_float8.py."""
    keys = {"float8_recipe": "tensorwise", "float8_modules": BLOCKS, "float8_all_gather": True, "float8_emulate": True}
    for message in ranks.see(toy.refusal, {"param_dtype": "bf16", **keys})[0]:
        assert "none of the 0 linear layers in " in message and "vision.blocks.0" in message


# --- what flags ask for beside the file


def test_the_file_is_read_once_and_the_flags_dtype_is_the_models(ranks2: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "fsdp2.yaml")
    assert all(found == ([path], "bf16", "bf16") for found in ranks2.run(toy.files_read, path))


@covers("recompute_modules")
def test_flags_recompute_blocks_where_the_file_names_no_modules(ranks: Ranks, ranks1: RankPool) -> None:
    first_blocks = {"vision.blocks.0", "language.blocks.0"}
    assert ranks1.run(toy.recomputed_by_flags, None) == [[first_blocks, first_blocks]]
    ((found,),) = ranks.see(toy.recomputed_by_flags, {"recompute_modules": ["vision.blocks.{1}"]}, number=1)
    assert found == [{"vision.blocks.1"}, set()]
