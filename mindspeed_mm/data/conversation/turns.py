"""Read the turns of the formats: sharegpt and OpenAI lists, alpaca columns, preference pairs, tool calls."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from mindspeed_mm.configs.data_config import DatasetAttr
from mindspeed_mm.data.conversation.contents import list_of_text, read_parts
from mindspeed_mm.data.conversation.messages import Message, RowFault, short_repr
from mindspeed_mm.utils.errors import did_you_mean

_BAD_TURN = "a turn can't be read"
_BAD_COLUMN = "a column can't be read"
MISSING_COLUMN = "a column is missing"
UNREAD_COLUMN = "a column is not read"


def role_table(attr: DatasetAttr) -> dict[str, str]:
    """Role in the file → role in a conversation. Published examples leave tags null; the usual names apply then."""
    table = {attr.user_tag: "user", attr.assistant_tag: "assistant"}
    for tag, role in ((attr.system_tag, "system"), (attr.observation_tag, "tool"), (attr.function_tag, "function")):
        if tag is not None:
            table[tag] = role
    usual = {"system": "system", "developer": "system", "tool": "tool", "observation": "tool"}
    usual["function_call"] = "function"
    return {**table, **{tag: role for tag, role in usual.items() if tag not in table}}


def missing_column(key: str, attr: DatasetAttr, found: Iterable[str], name: str | None = None) -> str:
    """Return the message that a column named in `attr` is missing, with the columns that were found.

    Args:
        key: Its key in `attr`.
        attr: Names of columns; those that it uses for other keys are no candidates for the nearest name.
        found: The columns of the row.
        name: The column; None: the one in `attr`.
    """
    found, name = list(found), name or getattr(attr, key)
    near = did_you_mean(name or "", found, used=(getattr(attr, other) for other in type(attr).model_fields))
    return f"column '{name}' (dataset_param.attr.{key}) not found; columns found: {', '.join(found)}{near}"


def as_text(value: object, column: str | None) -> str:
    """Return a column's text.

    Raises:
        RowFault: It has another type.
    """
    if not isinstance(value, str):
        raise RowFault(f"column '{column}': expected text, found {short_repr(value)}", _BAD_COLUMN)
    return value


class TurnReader:
    """Reads the turns of a row under the names of `attr`.

    Args:
        attr: Names of columns and roles.
        optional: Keys of `attr` whose columns rows may lack; of answers, `response` alone.
    """

    def __init__(self, attr: DatasetAttr, optional: Collection[str] = ()) -> None:
        self.attr = attr
        self._needs_response = "response" not in optional
        self._roles = role_table(attr)

    def sharegpt(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the turns of the messages column, then those of the answer column if `attr.response` names one."""
        column = self.attr.messages
        if column not in row and not (self.attr.ranking and self.attr.chosen):
            raise RowFault(missing_column("messages", self.attr, row), MISSING_COLUMN)
        turns = list_of_text(row.get(column)) if column in row else []
        if not isinstance(turns, list) or (column in row and not turns):
            raise RowFault(f"column '{column}': expected a list of turns, found {short_repr(turns)}", _BAD_COLUMN)
        messages = self._turns(turns)
        return messages + self.answer(row, "response") if self.attr.response else messages

    def _turns(self, turns: list[Any]) -> list[Message]:
        messages = []
        for number, turn in enumerate(turns):
            try:
                messages.append(self._turn(turn))
            except RowFault as fault:
                raise RowFault(f"turn {number + 1}: {fault}", fault.reason) from None
        return messages

    def _turn(self, turn: object) -> Message:
        role_tag, content_tag = self.attr.role_tag, self.attr.content_tag
        if not isinstance(turn, dict) or role_tag not in turn:
            near = did_you_mean(role_tag, turn, used=[content_tag]) if isinstance(turn, dict) else ""
            raise RowFault(
                f"expected an object with keys '{role_tag}' and '{content_tag}' (attr.role_tag, attr.content_tag), "
                f"found {short_repr(turn)}{near}",
                _BAD_TURN,
            )
        tag = turn[role_tag]
        role = self._roles.get(tag) if isinstance(tag, str) else None
        if role is None:
            raise RowFault(
                f"unknown role {short_repr(tag)}{did_you_mean(str(tag), self._roles)}; expected one of: "
                f"{', '.join(self._roles)} (attr.user_tag, attr.assistant_tag, …)",
                "unknown role",
            )
        calls = list_of_text(turn.get("tool_calls"))
        if content_tag not in turn and not calls:
            raise RowFault(
                f"no key '{content_tag}' (attr.content_tag); keys found: {', '.join(turn)}"
                f"{did_you_mean(content_tag, turn, used=[role_tag])}",
                _BAD_TURN,
            )
        content = turn.get(content_tag)
        message = Message("assistant" if role == "function" else role, [""], train=_loss_flag(turn))
        if role == "function":
            message.extra["tool_calls"] = _calls_in_text(content)
        else:
            message.parts = read_parts(content)
        if calls:
            message.extra["tool_calls"] = _plain_calls(calls)
        for key in ("reasoning_content", "name"):
            if isinstance(turn.get(key), str):
                message.extra[key] = turn[key]
        return message

    def alpaca(self, row: Mapping[str, Any]) -> list[Message]:
        """Return the turns of the history, prompt, query and response columns."""
        attr, messages = self.attr, []
        needed = [("prompt", attr.prompt)]
        if self._needs_response and not attr.ranking:
            needed.append(("response", attr.response))
        for key, name in needed:
            if name not in row:
                raise RowFault(missing_column(key, attr, row), MISSING_COLUMN)
        history = list_of_text(row.get(attr.history)) if attr.history else None
        for pair in history or ():
            if not isinstance(pair, list) or len(pair) != 2:
                raise RowFault(
                    f"column '{attr.history}': expected [question, answer] pairs, found {short_repr(pair)}", _BAD_COLUMN
                )
            messages.append(Message("user", [as_text(pair[0], attr.history)]))
            messages.append(Message("assistant", [as_text(pair[1], attr.history)]))
        query = [as_text(row[name], name) for name in (attr.prompt, attr.query) if name and row.get(name)]
        messages.append(Message("user", ["\n".join(query)]))
        return messages if attr.ranking else messages + self.answer(row, "response")

    def answer(self, row: Mapping[str, Any], key: str) -> list[Message]:
        """Return the turns of a column with an answer: a text, one turn or a list of turns; none if it is null or not
        needed.

        Args:
            row: The row.
            key: response, chosen or rejected.
        """
        column = getattr(self.attr, key)
        if column not in row and key == "response" and not self._needs_response:
            return []
        if column not in row:
            raise RowFault(missing_column(key, self.attr, row), MISSING_COLUMN)
        value = row[column]
        if self.attr.formatting != "alpaca":
            value = list_of_text(value)
        if value is None:
            return []
        if isinstance(value, str):
            return [Message("assistant", [value])]
        if isinstance(value, dict):
            value = [value]
        if not isinstance(value, list):
            raise RowFault(f"column '{column}': expected text or turns, found {short_repr(value)}", _BAD_COLUMN)
        try:
            return self._turns(value)
        except RowFault as fault:
            raise RowFault(f"column '{column}': {fault}", fault.reason) from None

    def preferences(self, row: Mapping[str, Any], prompt: list[Message]) -> tuple[list[Message], list[Message]]:
        """Return a preference pair: the turns with the preferred answer, and the turns of the rejected one.

        Both columns may have the whole conversation; their common beginning is then the prompt.
        """
        chosen, rejected = self.answer(row, "chosen"), self.answer(row, "rejected")
        if not chosen or not rejected:
            raise RowFault("a preference pair without both answers", "a preference pair isn't whole")
        common = 0
        while common < min(len(chosen), len(rejected)) - 1 and chosen[common] == rejected[common]:
            common += 1
        if len(chosen) > 1 and common:
            return chosen, rejected[common:]
        return prompt + chosen, rejected


def read_tools(value: object, column: str | None) -> list[Any] | None:
    """Return the schemas of a tools column: a list of them, one, or either as JSON text; None if there are none."""
    if isinstance(value, str):
        try:
            value = json.loads(value) if value.strip() else None
        except ValueError as error:
            raise RowFault(f"column '{column}' isn't valid JSON: {error}", "tools can't be read") from None
    if not value:
        return None
    value = value if isinstance(value, list) else [value]
    if not all(isinstance(tool, dict) for tool in value):
        raise RowFault(
            f"column '{column}': expected a list of tool schemas, found {short_repr(value)}", "tools can't be read"
        )
    return [_without_nulls(tool) for tool in value]


def _loss_flag(turn: Mapping[str, Any]) -> bool:
    for key in ("loss", "loss_mask"):
        value = turn.get(key)
        if value is None:
            continue
        if value not in (0, 1):
            raise RowFault(f"'{key}' is {short_repr(value)}; expected 0, 1, true or false", _BAD_TURN)
        return bool(value)
    return True


_BAD_CALL = "a tool call can't be read"


def _calls_in_text(content: object) -> list[dict[str, Any]]:
    """Read the calls of a function turn, which are JSON: an object with name and arguments, or a list of them."""
    value = content
    if isinstance(content, str):
        try:
            value = json.loads(content)
        except ValueError as error:
            message = f"a tool call that isn't valid JSON: {error}; found {short_repr(content)}"
            raise RowFault(message, _BAD_CALL) from None
    return _plain_calls(value)


def _plain_calls(calls: object) -> list[dict[str, Any]]:
    plain = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function", call) if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowFault(f"expected a tool call with 'name' and 'arguments', found {short_repr(call)}", _BAD_CALL)
        arguments = function.get("arguments", {})
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError):  # templates write text arguments as they are
                arguments = json.loads(arguments)
        call = {"name": function["name"], "arguments": _without_nulls(arguments)}
        plain.append({"type": "function", "function": call})
    return plain


def _without_nulls(value: object) -> Any:
    """Drop null members: Arrow fills every struct with the keys of all rows, and a schema must not grow by that."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
