"""Labels of tokens."""

from __future__ import annotations

#: label of a token that is not a target
IGNORE_INDEX = -100
