"""Typed sections of a configuration file, and the one way from a mapping to them.

A section is a frozen pydantic model. `build_section` sorts the keys of a mapping into fields, published keys that have
no effect here, and unknown ones; then it types the fields. All faults of a file come in one ConfigError, each with the
file, the dotted key, what was found, what was expected and the nearest valid name.
"""

from __future__ import annotations

import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, Union, overload

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mindspeed_mm.configs.older import settle_older
from mindspeed_mm.configs.older_keys import SettingKind
from mindspeed_mm.configs.reader import ConfigReader
from mindspeed_mm.configs.scalars import is_null_word, read_bool, read_dtype, read_float, read_int, show
from mindspeed_mm.utils.errors import ConfigError, did_you_mean, nearest_names

Bool = Annotated[bool, BeforeValidator(read_bool)]
Int = Annotated[int, BeforeValidator(read_int)]
Count = Annotated[int, BeforeValidator(read_int), Field(ge=1)]  # at least 1
Size = Annotated[int, BeforeValidator(read_int), Field(ge=0)]  # at least 0
Float = Annotated[float, BeforeValidator(read_float)]


def _read_paths(value: object) -> object:
    if isinstance(value, str):
        raise ValueError("expected a list of module paths: write it as an item, '- " + value + "'")
    return value


Paths = Annotated[list[str], BeforeValidator(_read_paths)]
Above0 = Annotated[float, BeforeValidator(read_float), Field(gt=0)]
AtLeast0 = Annotated[float, BeforeValidator(read_float), Field(ge=0)]


def _read_texts(value: object) -> object:
    return [value] if isinstance(value, str) else value


Texts = Annotated[list[str] | None, BeforeValidator(_read_texts)]  # one or several
DtypeName = Annotated[str, BeforeValidator(read_dtype)]


def one_of(known: tuple[str, ...], not_yet: tuple[str, ...] = ()) -> BeforeValidator:
    """Return a validator for names of `known`, and null; those of `not_yet` are published but refused for now."""

    def check(value: object) -> object:
        if value is None or value in known:
            return value
        choices = f"expected one of {', '.join(known)}" if len(known) > 1 else f"expected {known[0]}"
        if value in not_yet:
            raise ValueError(f"this one is not there yet; {choices}")
        raise ValueError(choices + (did_you_mean(value, known) if isinstance(value, str) else ""))

    return BeforeValidator(check)


class Section(BaseModel):
    """Base of all sections: frozen, and nothing outside its fields."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


SectionT = TypeVar("SectionT", bound=Section)


@dataclass
class SortedKeys:
    """The keys of a mapping: the part that the schema types, and the dotted paths of the rest."""

    typed: dict[str, Any] = field(default_factory=dict)
    published: dict[str, Any] = field(default_factory=dict)  # path → value; published keys that have no field here
    unknown: dict[str, Any] = field(default_factory=dict)  # path → value; unknown keys


@overload
def plain(mapping: ConfigReader | Mapping[str, Any]) -> Mapping[str, Any]: ...


@overload
def plain(mapping: object) -> object: ...


def plain(mapping: object) -> object:
    """Return a ConfigReader (or anything with `to_dict`) as plain data, everything else as it is."""
    return mapping.to_dict() if hasattr(mapping, "to_dict") else mapping


def join(prefix: str, key: str) -> str:
    """Join two parts of a dotted path."""
    return f"{prefix}.{key}" if prefix else key


def allows_none(annotation: object) -> bool:
    """Whether an annotation has None among its types."""
    if annotation is type(None):
        return True
    return any(allows_none(part) for part in typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS)


_UNIONS = (Union, types.UnionType)


def section_class(annotation: object) -> type[Section] | None:
    """Return the Section class inside an annotation such as `Attr` or `Attr | None`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    for part in typing.get_args(annotation) if typing.get_origin(annotation) in _UNIONS else ():
        found = section_class(part)
        if found is not None:
            return found
    return None


def key_paths(cls: type[Section], prefix: str = "") -> list[str]:
    """Return the dotted paths of all fields of a section and of the sections inside it."""
    paths = []
    for name, info in cls.model_fields.items():
        path = join(prefix, name)
        paths.append(path)
        inner = section_class(info.annotation)
        if inner is not None:
            paths += key_paths(inner, path)
    return paths


def sort_keys(cls: type[Section], mapping: Mapping[str, Any], published: Iterable[str] = ()) -> SortedKeys:
    """Sort the keys of `mapping` into fields of `cls`, those of the `published` dotted paths, and unknown ones.

    Null stands for the default wherever a field doesn't take null itself.
    """
    result = SortedKeys()
    known = _with_parents(published)
    result.typed = _sort_into(cls, mapping, "", known, result)
    return result


def _with_parents(paths: Iterable[str]) -> set[str]:
    every: set[str] = set()
    for path in paths:
        parts = path.split(".")
        every.update(".".join(parts[: i + 1]) for i in range(len(parts)))
    return every


def _sort_into(
    cls: type[Section], mapping: Mapping[str, Any], prefix: str, published: set[str], result: SortedKeys
) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for key, value in mapping.items():
        path = join(prefix, str(key))
        info = cls.model_fields.get(key)
        if info is None:
            _sort_outside(value, path, published, result)
            continue
        if is_null_word(value):
            value = None
        if value is None and not allows_none(info.annotation) and not info.is_required():
            continue
        inner = section_class(info.annotation)
        if inner is not None and isinstance(value, Mapping):
            value = _sort_into(inner, value, path, published, result)
        typed[key] = value
    return typed


def _sort_outside(value: object, path: str, published: set[str], result: SortedKeys) -> None:
    """A key without a field: published (then its own keys are looked at) or unknown (then they aren't)."""
    if path not in published:
        result.unknown[path] = value
        return
    children = [v for v in (value if isinstance(value, Sequence) else [value]) if isinstance(v, Mapping)]
    if not children or not any(p.startswith(path + ".") for p in published):
        result.published[path] = value
        return
    for child in children:
        for key, inner in child.items():
            _sort_outside(inner, join(path, str(key)), published, result)


def unknown_key_problems(
    kind: SettingKind | None,
    file: str,
    unknown: Mapping[str, Any],
    fields: Iterable[str],
    published: Iterable[str] = (),
) -> list[str]:
    """Return a sentence for each unknown key, and for each of an older release that is refused.

    Args:
        kind: of file: its older keys are known, and those without effect are logged once; None: it never had any.
        file: its name, for messages.
        unknown: dotted path → value.
        fields, published: dotted paths of the keys that there are, for hints.
    """
    fields, published, unknown = list(fields), list(published), dict(unknown)
    older = settle_older(kind, unknown, file) if kind else []
    return older + [unknown_key_message(file, path, value, fields, published) for path, value in unknown.items()]


def unknown_key_message(
    file: str, path: str, value: object, fields: Iterable[str], published: Iterable[str] = ()
) -> str:
    """Return the sentence about the unknown key `path`, with the name that was perhaps meant.

    Looked for in this order: the same name elsewhere, a similar one at its level, a similar one elsewhere. Names that
    are merely `published`, and have no effect, are offered at the key's own level only.
    """
    prefix, _, name = path.rpartition(".")
    start = prefix + "." if prefix else ""
    fields = sorted(set(fields))
    level = [p.removeprefix(start) for p in fields if p.startswith(start) and "." not in p.removeprefix(start)]
    published_level = {p.removeprefix(start).split(".")[0] for p in published if p.startswith(start)}
    hint = _belongs_at(name, prefix, fields) or did_you_mean(name, [*level, *published_level])
    if not hint:
        near = nearest_names(name, {p.rpartition(".")[2] for p in fields}, limit=1)
        hint = _belongs_at(near[0], prefix, fields) if near else ""
    if not hint and level:
        hint = f"; keys here: {', '.join(level[:12])}" + (", …" if len(level) > 12 else "")
    return f"{file}: unknown key '{path}' (value {show(value)}){hint}"


def _belongs_at(name: str, prefix: str, paths: Sequence[str]) -> str:
    places = [p for p in paths if p.rpartition(".")[2] == name]
    places.sort(key=lambda place: not place.startswith(prefix + "."))  # those below the key's own level first
    return f"; '{name}' belongs at '{places[0]}'" if places else ""


def validate_section(cls: type[SectionT], data: Mapping[str, Any], file: str) -> tuple[SectionT | None, list[str]]:
    """Type `data` (fields only, see `sort_keys`); return the section, or None and a sentence for each problem."""
    try:
        return cls.model_validate(data), []
    except ValidationError as error:
        return None, [_sentence(cls, file, item) for item in error.errors(include_url=False)]


def build_section(
    cls: type[SectionT],
    mapping: object,
    file: str | None,
    default_file: str,
    published: Iterable[str] = (),
    kind: SettingKind | None = None,
) -> tuple[SectionT, SortedKeys]:
    """Build a section from a mapping; the caller logs the notices about `SortedKeys.published`.

    `kind` is that of a whole file: its keys of older releases are known.

    Raises:
        ConfigError: unknown keys, missing keys, wrong types: all of them in one message.
    """
    file = file or getattr(mapping, "config_file", None) or default_file
    data = plain(mapping)
    if not isinstance(data, Mapping):
        raise ConfigError(f"{file}: found {show(data)}, expected an object with keys such as {_some_fields(cls)}")
    published = list(published)
    keys = sort_keys(cls, data, published)
    fields = key_paths(cls)
    problems = unknown_key_problems(kind, file, keys.unknown, fields, published)
    section, faults = validate_section(cls, keys.typed, file)
    raise_all(problems + faults)
    assert section is not None
    return section, keys


def given_values(section: Section, prefix: str = "") -> dict[str, Any]:
    """Return dotted key → value of what a mapping gave to a section and the sections inside it."""
    values: dict[str, Any] = {}
    for name in section.model_fields_set:
        value, path = getattr(section, name), f"{prefix}{name}"
        values.update(given_values(value, path + ".") if isinstance(value, Section) else {path: value})
    return values


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ConfigError with all problems, if there are any."""
    if problems:
        raise ConfigError("\n".join(problems))


def _some_fields(cls: type[Section]) -> str:
    return ", ".join(list(cls.model_fields)[:3])


def _sentence(cls: type[Section], file: str, item: ErrorDetails) -> str:
    kind, found, context = item["type"], item.get("input"), item.get("ctx") or {}
    path, info = _locate(cls, item["loc"])
    if kind == "missing":
        about = f": {info.description}" if info is not None and info.description else ""
        return f"{file}: key '{path}' is missing{about}"
    if kind == "value_error" and isinstance(found, Mapping):  # a rule about several keys of one section
        return f"{file}: {path + ': ' if path else ''}{context['error']}"
    if kind == "value_error":
        return f"{file}: '{path}' is {show(found)}; {context['error']}"
    if kind == "literal_error":
        choices = [str(choice) for choice in typing.get_args(_literal(info.annotation))] if info else []
        near = did_you_mean(found, choices) if isinstance(found, str) else ""
        return f"{file}: '{path}' is {show(found)}; expected one of {', '.join(choices)}{near}"
    return f"{file}: '{path}' is {show(found)}; {_EXPECTED.get(kind, item['msg']).format(**context)}"


_EXPECTED = {
    "string_type": "expected text",
    "list_type": "expected a list",
    "dict_type": "expected an object",
    "model_type": "expected an object",
    "greater_than": "expected more than {gt}",
    "greater_than_equal": "expected at least {ge}",
    "less_than": "expected less than {lt}",
    "less_than_equal": "expected at most {le}",
}


def _locate(cls: type[Section], loc: Sequence[int | str]) -> tuple[str, FieldInfo | None]:
    """Turn pydantic's location into a dotted path and the field it names (inner parts of unions are left out)."""
    path = ""
    info: FieldInfo | None = None
    current: type[Section] | None = cls
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif current is not None and part in current.model_fields:
            path, info = join(path, part), current.model_fields[part]
            current = section_class(info.annotation)
    return path, info


def _literal(annotation: object) -> object:
    if typing.get_origin(annotation) is typing.Literal:
        return annotation
    for part in typing.get_args(annotation):
        found = _literal(part)
        if found is not None:
            return found
    return None
