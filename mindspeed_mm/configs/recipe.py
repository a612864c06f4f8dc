"""What a kind of training is made of: the callbacks, and which published files describe it."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mindspeed_mm.configs.arguments import ExtraArgsProvider
from mindspeed_mm.configs.flags.spec import BACKENDS, BackendName
from mindspeed_mm.configs.other_scripts import FileKind

if TYPE_CHECKING:
    from mindspeed_mm.configs.run import Run

#: returns the model or a pipeline stage of it; is given what it has parameters for: see `Recipe.model`
ModelProvider = Callable[..., Any]
#: returns (train, valid, test); is given what it has parameters for: see `Recipe.data`
DataProvider = Callable[..., Any]
#: (data_iterator, model) → (output, loss_func)
ForwardStep = Callable[[Any, Any], tuple[Any, Callable[..., Any]]]


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
        model_schema, data_schema: which published keys model.json and data.json hold; None: keys of the script's own.
        backends: those that it can train with.
        own_flags: adds flags of the script's own: gets the parser, returns it.
        defaults: attribute → value that takes the place of a flag's default.
    """

    model: ModelProvider
    data: DataProvider
    forward_step: ForwardStep
    model_schema: FileKind | None = None
    data_schema: FileKind | None = None
    backends: tuple[BackendName, ...] = BACKENDS
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
