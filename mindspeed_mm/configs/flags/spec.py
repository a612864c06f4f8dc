"""The declaration of one flag, in a field of a group."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union

PathKind = Literal["file", "directory", "file or directory", "output"]

#: what a run trains with: FSDP2 with --use-torch-fsdp2, Megatron-core's parallelism without
BackendName = Literal["fsdp2", "ptd"]
BACKENDS: tuple[BackendName, ...] = ("fsdp2", "ptd")


@dataclass(frozen=True)
class Flag:
    """One flag: its spelling, type and explanation, and its effect here.

    `kind`, `optional`, `many`, `choices` and `words` are read from the field's annotation.
    """

    name: str  # of the attribute of `ParsedFlags`
    group: str
    default: Any
    help: str
    kind: type = str  # bool, int, float or str
    optional: bool = False  # None is a value of it
    many: bool = False  # takes one value or more
    choices: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()  # values in place of a number
    spellings: tuple[str, ...] = ()  # as written, the first is the name in messages and docs
    off_spellings: tuple[str, ...] = ()  # the same switch, turned off
    minimum: float | None = None
    above: float | None = None
    maximum: float | None = None
    below: float | None = None
    bare: Any = None  # value of the flag without a word after it
    path: PathKind | None = None
    synonyms: tuple[tuple[str, str], ...] = ()  # value written → value meant
    no_effect: Mapping[BackendName, str] = dataclasses.field(default_factory=dict)  # backend → why it has none there
    refused: Mapping[BackendName, str] = dataclasses.field(default_factory=dict)  # backend → what to do instead
    not_of_ours: str = ""  # what to do instead where the model is ours; a script's own model may read the flag
    harmless: tuple[Any, ...] = ()  # values without consequences: neither notice nor refusal

    @property
    def spelling(self) -> str:
        """The flag as messages name it."""
        return (self.spellings or self.off_spellings)[0]

    @property
    def backends(self) -> tuple[BackendName, ...]:
        """Where the flag is honoured."""
        return tuple(backend for backend in BACKENDS if backend not in self.no_effect and backend not in self.refused)

    @property
    def type_words(self) -> str:
        """The type, in words for `--help` and the documentation."""
        if self.kind is bool:
            return "switch"
        if self.choices:
            words = ", ".join(str(choice) for choice in self.choices)
        else:
            words = " or ".join(
                ({int: "whole number", float: "number", str: self.path or "text"}[self.kind], *self.words)
            )
        return f"{words} …" if self.many else words


class FlagDetails(dict[str, Any]):
    """The part of a flag's declaration that its field's name and type don't give."""


def flag(help: str, **details: Any) -> FlagDetails:
    """Describe a flag, inside `Annotated[type, flag(...)]` of a dataclass field.

    Args:
        help: one line for `--help` and the documentation.
        details: any further attribute of `Flag`: `spellings` (default: `--` and the field's name with dashes),
            `off_spellings`, `minimum`, `above`, `maximum`, `below`, `bare`, `path`, `synonyms`, `no_effect`,
            `refused` (a sentence for both backends, or backend → sentence), `not_of_ours`, `harmless`.
    """
    for name in ("no_effect", "refused"):
        if isinstance(details.get(name), str):
            details[name] = dict.fromkeys(BACKENDS, details[name])
    return FlagDetails(help=help, **details)


def no_effect(why: str | None = None, **backends: str) -> Callable[..., FlagDetails]:
    """Return a `flag` that is accepted, and logged once as having no effect here.

    Args:
        why: the reason on both backends.
        backends: the reason on one backend, `fsdp2=` or `ptd=`; on a backend without a reason the flag is honoured.
    """
    return functools.partial(flag, no_effect=backends if why is None else why)


def refused(why: str) -> Callable[..., FlagDetails]:
    """Return a `flag` whose neglect would change the result: giving it is an error with the sentence `why`."""
    return functools.partial(flag, refused=why)


def flags_of(group: type) -> tuple[Flag, ...]:
    """Return the flags that a group's fields declare, in their order."""
    return _flags_of(group)


@functools.cache
def _flags_of(group: type) -> tuple[Flag, ...]:
    hints = typing.get_type_hints(group, include_extras=True)
    title = (group.__doc__ or group.__name__).strip().splitlines()[0].rstrip(".")
    return tuple(_flag_of(field, hints[field.name], title) for field in dataclasses.fields(group))


def _flag_of(field: dataclasses.Field[Any], annotation: object, group: str) -> Flag:
    kind, details = typing.get_args(annotation)
    optional = many = False
    choices: tuple[Any, ...] = ()
    words: tuple[str, ...] = ()
    if typing.get_origin(kind) in (Union, types.UnionType):
        parts = [part for part in typing.get_args(kind) if part is not type(None)]
        optional, kind = len(parts) < len(typing.get_args(kind)), parts[0]
        words = tuple(word for part in parts[1:] for word in typing.get_args(part))
    if typing.get_origin(kind) is list:
        many, kind = True, typing.get_args(kind)[0]
    if typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
        kind = type(choices[0])
    default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    return Flag(
        name=field.name,
        group=group,
        default=default,
        kind=kind,
        optional=optional,
        many=many,
        choices=choices,
        words=words,
        **{"spellings": ("--" + field.name.replace("_", "-"),), **details},
    )


def all_flags(groups: tuple[type, ...]) -> Iterator[Flag]:
    """Yield the flags of all groups."""
    for group in groups:
        yield from flags_of(group)
