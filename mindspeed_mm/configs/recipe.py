"""What a kind of training is made of: the callbacks, and which published files describe it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.arguments import ExtraArgsProvider
from mindspeed_mm.configs.eval_metrics import MetricName
from mindspeed_mm.configs.flags.spec import BACKENDS, BackendName
from mindspeed_mm.configs.other_scripts import FileKind

if TYPE_CHECKING:
    from mindspeed_mm.configs.run import Run

#: returns the model or a pipeline stage of it; is given what it has parameters for: see `Recipe.model`
ModelProvider = Callable[..., Any]
#: returns (train, valid, test); is given what it has parameters for: see `Recipe.data`
DataProvider = Callable[..., Any]
#: prepares a collated micro-batch for the model, in host memory
Preparation = Callable[[dict[str, Any]], dict[str, Any]]
#: (data_iterator, model) → (output, loss_func)
ForwardStep = Callable[[Any, Any], tuple[Any, Callable[..., Any]]]


@dataclass(frozen=True)
class GeneratedFigures:
    """What an evaluation has found of the samples that a model generated; the same on all ranks.

    Attributes:
        figures: its figures, by name.
        rows: number of validation rows that they are of.
        samples: some of the samples, as JSON objects for eval_answers.jsonl.
    """

    figures: Mapping[MetricName, float] = field(default_factory=dict)
    rows: int = 0
    samples: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class DrawnSample:
    """A picture or a clip that a model in training has made of a prompt.

    Attributes:
        prompt: its prompt.
        index: number of the prompt.
        seed: seed of its noise.
        size: frames, height and width in pixels.
        files: ending of the name of a file → its content: a JPEG of each shown frame, and an mp4 of a clip.
    """

    prompt: str
    index: int
    seed: int
    size: tuple[int, int, int]
    files: Mapping[str, bytes]


#: (backend) → the samples of all ranks; a collective
SampleDrawer = Callable[[Any], Sequence[DrawnSample]]
#: (run, RunData) → drawer; None: the flags ask for none
DrawerProvider = Callable[["Run", Any], SampleDrawer | None]
#: (backend) → figures; called at each evaluation, a collective
SampleScorer = Callable[[Any], GeneratedFigures]
#: (run, ValidData) → scorer; None: the flags ask for none
ScorerProvider = Callable[["Run", Any], SampleScorer | None]


@dataclass(frozen=True)
class Recipe:
    """A kind of training.

    Attributes:
        model: returns the model, or with pipeline parallelism a stage of it. Of `run` (the Run), `pre_process`,
            `post_process` (whether the stage is the first, the last) and `vp_stage` (number of its chunk, None without
            interleaving) it is given those that it has parameters for.
        data: returns (train, valid, test), each a data set, a DataLoader or None. Of `run` and `start` (a DataStart) it
            is given those that it has parameters for; any other single parameter gets the numbers of samples
            [train, valid, test], as Megatron's providers do.
        forward_step: (data_iterator, model) → (output, loss_func).
        preparation: (backend, Run) → what the loader's workers do with each micro-batch, after which it may be moved to
            the device; `forward_step` then gets it prepared. None: it prepares micro-batches itself.
        model_schema, data_schema: which published keys model.json and data.json hold; None: keys of the script's own.
        backends: those that it can train with.
        scorer: (run, ValidData) → what scores samples that the model generates for validation rows, at each evaluation;
            called once the data are open, before the model is built, so that rows and model can be refused then. None:
            nothing is generated.
        drawer: (run, RunData) → what draws samples of prompts while the model is trained (--sample-interval); called
            like `scorer`. None: the model makes no pictures.
        own_flags: adds flags of the script's own: gets the parser, returns it.
        defaults: attribute → value that takes the place of a flag's default.
    """

    model: ModelProvider
    data: DataProvider
    forward_step: ForwardStep
    preparation: Callable[[Any, Run], Preparation | None] | None = None
    model_schema: FileKind | None = None
    data_schema: FileKind | None = None
    backends: tuple[BackendName, ...] = BACKENDS
    scorer: ScorerProvider | None = None
    drawer: DrawerProvider | None = None
    own_flags: ExtraArgsProvider | None = None
    defaults: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for function, schema in ((self.model, self.model_schema), (self.data, self.data_schema)):
            if schema is not None:
                _recipes.setdefault(function, self)

    def model_of(self, run: Run) -> ModelProvider:
        """Return the model's provider with `run` given, where it has a parameter of this name."""
        taken = inspect.signature(self.model).parameters
        return functools.partial(self.model, run=run) if "run" in taken else self.model


_recipes: dict[Callable[..., Any], Recipe] = {}


def recipe_of(function: Callable[..., Any]) -> Recipe | None:
    """Return the recipe that a model or data provider of this package belongs to; None: it is a script's own.

    A script may give one of ours to `pretrain` with callbacks of its own.
    """
    return _recipes.get(function)
