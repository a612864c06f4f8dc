"""Write docs/models.md from the registry: every adapted family, what it reads, and the sizes that tests check.

`python scripts/make_models_docs.py` writes the file; `--check` only reports whether it is up to date, and whether the
README files count as many families.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from mindspeed_mm.models.common.families import PACKAGE, find_family  # noqa: E402
from mindspeed_mm.models.common.family import FamilyTraits  # noqa: E402
from mindspeed_mm.models.common.modelzoo import ModelHub  # noqa: E402
from mindspeed_mm.models.common.paths import OLDER_PATHS  # noqa: E402
from mindspeed_mm.models.generation.predictor.family import PredictorFamily  # noqa: E402
from mindspeed_mm.models.generation.predictor.family import families as predictors  # noqa: E402
from mindspeed_mm.models.transformers.inferred import traits_of  # noqa: E402
from tests.support.families import families  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
HEAD = ("family", "model_type", "class", "media", "packed rows", "published sizes", "Megatron-core form")

GENERATION_HEAD = ("model_id", "class of diffusers", "tasks", "trained by", "timesteps")

INTRODUCTION = """# Models

<!-- Made by scripts/make_models_docs.py from the registry: change a family, then run the script. -->

A model is named by its Hugging Face directory in model.json (`init_from_hf_path`); config.json there states its family,
and `model_id` may state another. The families below are adapted: their samples are their processor's, the rows of
different ranks may have different media, and `tests/parity/test_families.py` compares each with plain transformers.
"Packed rows": whether several samples may share a row (`packing`). "Published sizes": those whose number of parameters
a test checks. "Megatron-core form": the family also trains without `--use-torch-fsdp2`.
"""

REST = """
## Attention

Without `attn_implementation` in model.json, the language model's attention is computed document by document, without a
mask, by the fastest kernel of the device: FlashAttention-3 where `flash_attn_interface` is installed (Hopper), else
PyTorch's own FlashAttention-2, on CUDA with bf16 or fp16; `npu_fusion_attention` on Ascend devices; PyTorch's flash
attention on the host; and PyTorch's `scaled_dot_product_attention` where none of these computes the dtype or the size
of the heads. Sliding windows and attention sinks are computed, too. Encoders that cut one long row into images, frames
or windows compute each of them by the same kernels, and read their lengths once instead of in every layer.
`mindspeed-mm doctor` prints the table for the machine, and why other kernels aren't taken.

transformers' own attention, under masks, remains: in the families <masked>;
with `attention_dropout` or `attn_logit_softcapping` in config.json; for rows whose `attention_mask` has zeros between
its tokens, and padded rows of a model with linear attention; while a model writes answers; and wherever
`attn_implementation` states one (`sdpa`, `eager`, `flash_attention_2` …). A part may state its own, as in
`text_decoder.attn_implementation`.

## Models without a family

Any other architecture of transformers with a language-model head trains on FSDP2 without registration:

* Without `sub_modules_to_wrap` in fsdp2.yaml, the blocks that transformers names become FSDP units (or else every
  list of modules of one class). A notice gives the list, for copying. `[]` leaves the model in one unit. Adapted
  families are wrapped in the same way if fsdp2.yaml has no list.
* Encoders (the modules of `vision_config` and `audio_config`) stay in the root's unit, so that the rows of different
  ranks may have different media. A step without such media on any rank still decays the encoder's weights. If
  fsdp2.yaml makes an encoder's blocks units, every micro-batch needs input for them; one without it is refused.
* Packed rows are refused, because no test proves that the samples of a row don't attend to each other.
* `freeze` works for the encoders, for the modules between a single encoder and the decoder, and for the decoder.

## Paths of older layouts

`sub_modules_to_wrap`, `ignored_modules` and `recompute_modules` hold paths of transformers' current model.
If a path matches nothing there, but begins with a path of an older layout from published files
(`visual.blocks.{*}`), the beginning is replaced; a notice gives the path to write:

<older paths>

A path that is neither in the model nor in this table is an error. One message names all such paths of a file, each
with the nearest path of the model.

## Balance of experts

`loss_cfg.router_aux_loss_coef` in model.json (or `output_router_logits: true` in config.json, with the coefficient
there) trains the load-balancing loss of experts together with the token loss. It is defined per sample as
`E · Σ f_e · P_e` over the sample's tokens in all layers with E experts. f_e is how often expert e is among a token's
best k, per token and layer, and P_e is its mean probability (transformers' `load_balancing_loss_func` for a single
sample). A step's value is the mean over samples, weighted as their targets are in the token loss: by their number for
`per_token_loss`, equally for `per_sample_loss`. So it is the same however the global batch is split into ranks,
micro-batches and packs; padding never counts. It is logged as `router_aux_loss`, without the coefficient; `loss` is the
token loss only, and `grad_norm` that of both. Recompute is non-reentrant then. A model for which transformers has no
such loss (DeepSeek-V3 balances its experts by a bias) is refused.

Every step of a model with experts logs their load: `expert_imbalance` is the largest number of tokens that an expert of
any layer received, divided by the mean over all experts, and `dead_experts` the number of experts that received none.
Both are of the whole global batch, in any layout, and padding never counts.
"""

GENERATION = """
## Models that make images and videos

`pretrain_sora.py` trains the transformer of a diffusers pipeline without changes to its code: `init_from_diffusers` in
model.json names the pipeline's directory, and `predictor.model_id` one of the families below (or the transformer's own
config.json states it). The autoencoder and the text encoders are also the pipeline's, and its own `encode_prompt`
encodes captions. `tests/parity/test_predictors.py` compares each family with a loss written with diffusers alone.
"Timesteps": the default distribution, and its shift towards noise.

"""

GENERATION_REST = """
`t2v`: text to video; `i2v` and `ti2v`: text and a first frame to video, where the transformer is given the frame in
addition to the noise (`i2v`) or in place of it (`ti2v`: each token has its own timestep); `t2i`: text to image. A data
set of videos may also contain images, as clips of one frame.

Published names (`wandit`, `hunyuanvideo15dit`, and a structure of `hidden_size`, `num_layers` …) are translated to
diffusers' configuration; so are the paths in published fsdp2.yaml files (`predictor.head` of Wan,
`predictor.double_blocks` of HunyuanVideo 1.5), and a notice gives the path to write. Wan 2.2's A14B has two
transformers, which are trained in two runs, each with its part of the timesteps.

A family is one file in `mindspeed_mm/models/generation/predictor/`, with its class, its pipelines and its forward call.
"""


def row(name: str) -> list[str]:
    """The table row of one family."""
    family = find_family(name)
    assert family is not None
    title = (importlib.import_module(f"{PACKAGE}.{name}").__doc__ or name).splitlines()[0]
    traits: FamilyTraits = traits_of(family.model_class)
    media = dict.fromkeys(kind for tower in traits.towers for kind in tower.modalities)
    published = families()[name].published if name in families() else {}
    return [
        title.partition(":")[0].rstrip("."),
        f"`{name}`",
        f"`{family.model_class.__name__}`",
        ", ".join(media) or "text",
        "yes" if traits.packed_positions is not None else "",
        ", ".join(published),
        "yes" if family.megatron is not None else "",
    ]


def generation_row(family: type[PredictorFamily]) -> list[str]:
    """The table row of one family that makes images or videos."""
    defaults = family.defaults
    shift = "by the number of tokens" if defaults.dynamic_shift else f"{defaults.shift:g}"
    drawn = {"logit_normal": "logit-normal"}.get(defaults.sampling, defaults.sampling)
    is_flow = defaults.objective == "flow_matching"
    return [
        ", ".join(f"`{name}`" for name in (*family.names, *family.published_names)),
        f"`{family.model_class_name}`",
        ", ".join(family.pipelines),
        "flow matching" if is_flow else f"denoising diffusion ({defaults.prediction_type})",
        f"{drawn}, shift {shift}" if is_flow else f"{defaults.beta_schedule} betas",
    ]


def masked_families() -> str:
    """The families whose language models have transformers' own attention, by model type."""
    classes = {name: family.model_class for name in ModelHub.families() if (family := find_family(name)) is not None}
    return ", ".join(f"`{name}`" for name, found in classes.items() if traits_of(found).attention is None)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *("| " + " | ".join(cells) + " |" for cells in rows)]) + "\n"


def make_page() -> str:
    """The whole page."""
    adapted = table(HEAD, [row(name) for name in ModelHub.families()])
    of_pictures = sorted(set(predictors().values()), key=lambda family: family.names)
    generation = table(GENERATION_HEAD, [generation_row(family) for family in of_pictures])
    older = table(("published", "today"), [[f"`{old}`", f"`{new}`"] for old, new in OLDER_PATHS.items()])
    rest = REST.replace("<older paths>\n", older).replace("<masked>", masked_families())
    return INTRODUCTION + "\n" + adapted + rest + GENERATION + generation + GENERATION_REST


#: README → the form in which it states the number of adapted families
COUNTS = {"README.md": r"\| families \| (\d+), each", "README.zh.md": r"(\d+) 个系列"}


def miscounted() -> list[str]:
    """Return a sentence for each README file that states another number of families."""
    count = len(ModelHub.families())
    stated = {name: re.findall(form, (ROOT / name).read_text(encoding="utf-8")) for name, form in COUNTS.items()}
    wrong = {name: found for name, found in stated.items() if found != [str(count)]}
    return [f"{name} says {found} families; there are {count}" for name, found in wrong.items()]


def main(argv: Sequence[str]) -> int:
    """Write the page, or check it; return the exit status."""
    page = make_page()
    if "--check" in argv:
        fresh = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        print(f"{PAGE} is {'up to date' if fresh else 'out of date: run scripts/make_models_docs.py'}")
        wrong = miscounted()
        print("\n".join(wrong))
        return 0 if fresh and not wrong else 1
    PAGE.write_text(page, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
