"""Recognise the form of a data set's rows from the first ones, where data.json's `attr` doesn't describe it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.conversation.contents import list_of_text
from mindspeed_mm.data.places import Place
from mindspeed_mm.data.sources.files import DataEntry
from mindspeed_mm.data.sources.near_forms import nearest_attr
from mindspeed_mm.data.sources.row_files import open_rows
from mindspeed_mm.utils.errors import DataError
from mindspeed_mm.utils.log import info_rank0

#: rows of each file that are inspected
_ROWS = 1_000
_ROWS_FOR_NEAREST = 16
_MEDIA_COLUMNS = {"images": ("images", "image"), "videos": ("videos", "video"), "audios": ("audios", "audio")}
_ALL_MEDIA_COLUMNS = frozenset(itertools.chain.from_iterable(_MEDIA_COLUMNS.values()))
#: where one of these isn't named by `attr`, its column is looked for; every other key describes the form
_BESIDE = (*_MEDIA_COLUMNS, "packing", "pretrain", "ranking")
#: columns beside a form's own that are read if the first rows have them; the last two beside prompt and answer
_PARTS = ("system", "tools", "history", "input")
_TURN_COLUMNS = ("messages", "conversations")
_TURN_KEYS = (("role", "content"), ("from", "value"))
_USER_ROLES, _ASSISTANT_ROLES = ("user", "human"), ("assistant", "gpt")
_COLUMN_FORMS = (("instruction", "output"), ("query", "response"))
KNOWN_FORMS = (
    "'messages' or 'conversations' with a list of turns (keys role and content, or from and value; roles user or "
    "human, assistant or gpt), 'query' and 'response' (with 'history', 'system'), 'instruction' and 'output' (with "
    "'input', 'history', 'system')"
)


class UnknownForm(DataError):
    """Rows have none of the forms that are known.

    Attributes:
        nearest: keys of `attr` that describe what they probably hold; {}: nothing is near.
    """

    def __init__(self, paths: Sequence[str], columns: Collection[str], nearest: Mapping[str, str]) -> None:
        """
        Args:
            paths: of the files.
            columns: of their first rows.
            nearest: see `nearest_attr`.
        """
        self.nearest = dict(nearest)
        near = f", probably {json.dumps(self.nearest, ensure_ascii=False)}" if self.nearest else ""
        super().__init__(
            f"{', '.join(paths)}: the form of the rows isn't known; columns found: {', '.join(sorted(columns))}; "
            f"known forms: {KNOWN_FORMS}; for another one, name the columns in dataset_param.attr{near}"
        )


@dataclass(frozen=True)
class _Form:
    """A row's form: keys of `attr`; roles that don't occur in the row are absent."""

    shape: tuple[str, ...]
    roles: tuple[tuple[str, str], ...] = ()

    def agrees(self, other: _Form) -> bool:
        mine = dict(self.roles)
        return self.shape == other.shape and all(mine.get(key, role) == role for key, role in other.roles)


def recognise(entry: DataEntry, only: str | None = None) -> DataEntry:
    """Return a data set with the names of its columns and roles, recognised from its first rows if `attr` names none.

    If rows may lack answers (`response` is among the data set's optional keys), prompts alone are a form, too.

    `attr` decides if it describes anything of the form; media columns that it names, or sets to null, are always kept.

    Args:
        entry: the data set.
        only: first column of the one form that is looked for ('messages', 'instruction', …); None: all forms.

    Raises:
        DataError: rows of two forms (with one row of each), of none that is known (with the columns found), or two
            columns with media of one kind.
    """
    attr = entry.attr
    given = {key for key in attr.model_fields_set if getattr(attr, key) is not None}
    if attr.pretrain or attr.ranking or given - set(_BESIDE):
        return entry
    found: _Form | None = None
    roles: dict[str, str] = {}
    first: Place | None = None
    columns: set[str] = set()
    filled: dict[str, Place] = {}
    for row, where in _first_rows(entry):
        columns.update(row)
        for column in row.keys() & _ALL_MEDIA_COLUMNS:
            if row[column]:
                filled.setdefault(column, where)
        form = _form_of(row, where, "response" not in entry.optional, only)
        if form is None:
            continue
        if found is not None and not _Form(found.shape, tuple(roles.items())).agrees(form):
            raise DataError(
                f"rows of two forms: {first} has {_describe(found)}, {where} has {_describe(form)}; write them in one "
                "form, or as two data sets of dataset_info.json"
            )
        if found is None:
            found, first = form, where
        roles.update(form.roles)
    if not columns:
        return entry  # an empty or damaged file: reading it raises the error
    if found is None:
        first_rows = itertools.islice(_first_rows(entry), _ROWS_FOR_NEAREST)
        raise UnknownForm(entry.paths, columns, nearest_attr(row for row, _ in first_rows))
    names = {**_names(found, roles, columns), **_media(attr, columns, filled)}
    info_rank0(
        f"{', '.join(entry.paths)}: rows recognised as {_describe(found)}; "
        + ", ".join(f"{key}: {name}" for key, name in names.items())
    )
    merged = DatasetAttr(**{key: getattr(attr, key) for key in attr.model_fields_set} | names)
    spoken = {name for key, names in _MEDIA_COLUMNS.items() if key in attr.model_fields_set for name in names}
    read = {getattr(merged, key) for key in _MEDIA_COLUMNS}
    parts = frozenset(_PARTS if len(found.shape) == 2 else _PARTS[:2]) - columns
    return replace(entry, attr=merged, unread=(_ALL_MEDIA_COLUMNS - spoken - read) | parts)


def _first_rows(entry: DataEntry) -> Iterator[tuple[dict[str, Any], Place]]:
    for path in entry.paths:
        file = open_rows(path)
        for index, row in enumerate(itertools.islice(file.head(_ROWS), entry.max_rows)):
            if isinstance(row, dict):
                yield row, Place(file, index)


def _form_of(row: Mapping[str, Any], where: Place, needs_answer: bool, only: str | None) -> _Form | None:
    """The form of a row; None: of no known one, or with a fault that reading it will report."""
    forms = [form for column in _TURN_COLUMNS if (form := _form_of_turns(column, list_of_text(row.get(column))))]
    needed = {pair: pair if needs_answer else pair[:1] for pair in _COLUMN_FORMS}
    forms += [_Form(pair) for pair in _COLUMN_FORMS if all(row.get(column) is not None for column in needed[pair])]
    forms = [form for form in forms if only in (None, form.shape[0])]
    if len(forms) > 1:
        raise DataError(
            f"{where}: has {' and '.join(_describe(form) for form in forms)}; say in dataset_param.attr which is read"
        )
    return forms[0] if forms else None


def _form_of_turns(column: str, turns: object) -> _Form | None:
    turns = [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []
    for keys in _TURN_KEYS:
        named = [turn[keys[0]] for turn in turns if isinstance(turn.get(keys[0]), str)]
        if named:
            known = (("user_tag", _USER_ROLES), ("assistant_tag", _ASSISTANT_ROLES))
            roles = [(key, next((role for role in named if role in usual), None)) for key, usual in known]
            return _Form((column, *keys), tuple((key, role) for key, role in roles if role is not None))
    return None


def _names(form: _Form, roles: Mapping[str, str], columns: Collection[str]) -> dict[str, str]:
    """The keys of `attr` for rows of this form."""
    beside = {key: key for key in ("system", "tools") if key in columns}
    if len(form.shape) == 2:
        prompt, response = form.shape
        extra = {"query": "input"} if prompt == "instruction" and "input" in columns else {}
        history = {"history": "history"} if "history" in columns else {}
        return {"formatting": "alpaca", "prompt": prompt, **extra, "response": response, **history, **beside}
    column, role, content = form.shape
    kind = _TURN_KEYS.index((role, content))
    usual = {"user_tag": _USER_ROLES[kind], "assistant_tag": _ASSISTANT_ROLES[kind]}
    return {"messages": column, "role_tag": role, "content_tag": content, **usual, **roles, **beside}


def _media(attr: DatasetAttr, columns: Collection[str], filled: Mapping[str, Place]) -> dict[str, str]:
    """The columns of media that `attr` doesn't mention; of two names, the one whose column isn't empty."""
    found = {}
    for key, names in _MEDIA_COLUMNS.items():
        there = [name for name in names if name in filled] or [name for name in names if name in columns]
        if key in attr.model_fields_set or not there:
            continue
        if len(there) > 1 and there[0] in filled:
            raise DataError(
                f"{filled[there[0]]} has '{there[0]}' and {filled[there[1]]} has '{there[1]}'; name the column "
                f"that is read in dataset_param.attr.{key}"
            )
        found[key] = there[0]
    return found


def _describe(form: _Form) -> str:
    if len(form.shape) == 2:
        return " and ".join(f"'{column}'" for column in form.shape)
    column, role, content = form.shape
    roles = f", roles {', '.join(name for _, name in form.roles)}" if form.roles else ""
    return f"'{column}' with turns of {role} and {content}{roles}"
