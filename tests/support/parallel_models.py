"""Models and layouts of the acceptance table of context, expert and tensor parallelism under FSDP2."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.families import Family, families
from tests.support.tiny import tiny_qwen3_dir
from tests.support.tiny_text import text_dir

#: of Qwen3-MoE's load-balancing loss
BALANCE = 0.1


@dataclass(frozen=True)
class Layout:
    """How the processes of a run share its work.

    Attributes:
        world: number of processes.
        flags: of the launch.
        fsdp2: keys of fsdp2.yaml.
        kinds: parallelisms in it: "context", "experts", "tensor".
        data_parallel: ranks that read rows of their own.
    """

    world: int
    flags: Mapping[str, Any] = field(default_factory=dict)
    fsdp2: Mapping[str, Any] = field(default_factory=dict)
    kinds: frozenset[str] = frozenset()

    @property
    def data_parallel(self) -> int:
        """Number of ranks that read rows of their own."""
        model = self.flags.get("context_parallel_size", 1) * self.flags.get("tensor_model_parallel_size", 1)
        return self.world // int(model)


def _context(size: int, algorithm: str = "ulysses", ulysses: int | None = None) -> dict[str, Any]:
    name = {"ulysses": "ulysses_cp_algo", "ring": "megatron_cp_algo", "both": "hybrid_cp_algo"}[algorithm]
    flags = {"context_parallel_size": size, "context_parallel_algo": name}
    return flags if ulysses is None else {**flags, "ulysses_degree_in_cp": ulysses}


def _layout(world: int, *flags: Mapping[str, Any], **fsdp2: Any) -> Layout:
    merged = {name: value for part in flags for name, value in part.items()}
    kinds = {"context_parallel_size": "context", "expert_model_parallel_size": "experts"}
    kinds["tensor_model_parallel_size"] = "tensor"
    return Layout(world, merged, fsdp2, frozenset(kind for flag, kind in kinds.items() if flag in merged))


_EP2, _EP4 = {"expert_model_parallel_size": 2}, {"expert_model_parallel_size": 4}
_TP2, _SP = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}
_U2, _R2 = _context(2), _context(2, "ring")

LAYOUTS: dict[str, Layout] = {
    "1 process": _layout(1),
    "FSDP2": _layout(2),
    "HSDP 2x2": _layout(4, sharding_size=2),
    "CP2 Ulysses": _layout(2, _U2),
    "CP2 ring": _layout(2, _R2),
    "CP4 Ulysses": _layout(4, _context(4)),
    "CP4 ring": _layout(4, _context(4, "ring")),
    "CP4 ring 2 x Ulysses 2": _layout(4, _context(4, "both", 2)),
    "CP2 Ulysses, DP2": _layout(4, _U2),
    "CP2 ring, DP2, sharded over 2": _layout(4, _R2, sharding_size=2),
    "EP2": _layout(2, _EP2),
    "EP4": _layout(4, _EP4),
    "EP2 x FSDP2": _layout(4, _EP2),
    "EP2, 2 copies": _layout(4, _EP2, reshard_local_experts=False),
    "TP2": _layout(2, _TP2),
    "TP2 SP": _layout(2, _TP2, _SP),
    "TP2 x FSDP2": _layout(4, _TP2),
    "TP2 SP x FSDP2": _layout(4, _TP2, _SP),
    "TP2, CP2 Ulysses": _layout(4, _TP2, _U2),
    "TP2, CP2 ring": _layout(4, _TP2, _R2),
    "TP2, EP2": _layout(2, _TP2, _EP2),
    "CP2 Ulysses, EP2": _layout(2, _U2, _EP2),
    "CP2 ring, EP2 x FSDP2": _layout(4, _R2, _EP2),
    "CP2 Ulysses, TP2, EP2": _layout(4, _U2, _TP2, _EP2),
    "CP2 Ulysses, TP2, EP4": _layout(4, _U2, _TP2, _EP4),
}


@dataclass(frozen=True)
class Model:
    """A model of the table.

    Attributes:
        title: what the documentation calls it.
        family: its directory, rows and kinds of media.
        balance: coefficient of its load-balancing loss.
        refused: parallelism → what the message of its refusal says.
        script: the entry script that trains it.
    """

    title: str
    family: Family
    balance: float = 0.0
    refused: Mapping[str, str] = field(default_factory=dict)
    script: str = "pretrain_transformers.py"

    def refusal(self, layout: Layout) -> str | None:
        """What the message says that refuses a layout; None: it trains."""
        return next((self.refused[kind] for kind in sorted(layout.kinds) if kind in self.refused), None)


def _tied(path: Path) -> Path:
    return tiny_qwen3_dir(path, seed=3, tie=True)


def qwen3_moe_dir(path: Path, experts: int = 8) -> Path:
    """Make a Qwen3-MoE directory; with two experts every token goes to both, so that no rounding changes a choice."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"num_experts": experts, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    fields = {**sizes, "num_hidden_layers": 3, "mlp_only_layers": [1], "head_dim": 24, "tie_word_embeddings": False}
    return text_dir(path, Qwen3MoeForCausalLM, Qwen3MoeConfig, fields)


_FAMILIES = families()
_NO_EXPERTS = {"experts": "there are no experts to be split"}
#: why a parallelism is refused to some models
REASONS = {"experts": "no experts", "tensor": "latent attention has no heads of its own to split"}

MODELS: dict[str, Model] = {
    "qwen3": Model("Qwen3, tied", replace(_FAMILIES["qwen3"], make=_tied), refused=_NO_EXPERTS),
    "qwen3_moe": Model("Qwen3-MoE", replace(_FAMILIES["qwen3_moe"], make=qwen3_moe_dir), BALANCE),
    "gpt_oss": Model("GPT-OSS", _FAMILIES["gpt_oss"]),
    "deepseek_v3": Model("DeepSeek-V3", _FAMILIES["deepseek_v3"], refused={"tensor": "latent attention|MLA"}),
    "qwen2_5_vl": Model("Qwen2.5-VL", _FAMILIES["qwen2_5_vl"], refused=_NO_EXPERTS),
    "qwen3_vl": Model("Qwen3-VL", _FAMILIES["qwen3_vl"], refused=_NO_EXPERTS),
    "qwen3_vl_moe": Model("Qwen3-VL-MoE", _FAMILIES["qwen3_vl_moe"], script="pretrain_vlm.py"),
    "glm4v_moe": Model("GLM-4.5V", _FAMILIES["glm4v_moe"]),
    "internvl": Model("InternVL3", _FAMILIES["internvl"], refused=_NO_EXPERTS),
    "qwen3_omni_moe": Model("Qwen3-Omni", _FAMILIES["qwen3_omni_moe"]),
}
