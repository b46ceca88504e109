"""Checks of what callers pass: the type and the range of each argument, in one place and in one form of words.

A check returns the value as the rest of PolyCCL wants it, or raises `InvalidArgument`, which names the argument, shows the value
and says what is wanted. Integers are whatever has ``__index__`` (NumPy's too), but no bool. Tensors are checked natively.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Mapping, MutableSequence, Sequence
from datetime import timedelta
from numbers import Real
from typing import Any, NoReturn

from .errors import InvalidArgument

Timeout = timedelta | float | None
"""A length of time: a timedelta, or seconds. None: the default."""

TAGS = 2**32
"""Tags are smaller than this."""


def shown(value: object) -> str:
    """Return ``value`` as an error text shows it: its repr, cut to 80 characters."""
    try:
        text = repr(value)
    except Exception:
        text = "of a class whose repr() fails"
    text = " ".join(text.split())
    text = text if len(text) <= 80 else f"{text[:77]}..."
    return text if value is None or isinstance(value, (bool, int, float, str)) else f"{text} ({type(value).__name__})"


def refuse(name: str, value: object, wanted: str) -> NoReturn:
    """Raise InvalidArgument for argument ``name``."""
    raise InvalidArgument(f"{name} must be {wanted}, and is {shown(value)}")


def _index(value: object) -> int | None:
    """Return ``value`` as an int; None if it is no integer."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except Exception:  # foreign classes raise what they like
        return None


def integer(name: str, value: object, low: int, high: int, wanted: str = "") -> int:
    """Return an integer from ``low`` to ``high``."""
    number = _index(value)
    if number is None or not low <= number <= high:
        refuse(name, value, wanted or f"an integer from {low} to {high}")
    return number


def rank(name: str, value: object, size: int) -> int:
    """Return a rank of a communicator of ``size`` ranks."""
    if type(value) is int and 0 <= value < size:  # what nearly all calls give
        return value
    number = _index(value)
    if number is None or not 0 <= number < size:
        refuse(name, value, f"a rank from 0 to {size - 1}")
    return number


def rank_list(name: str, value: object, size: int) -> list[int]:
    """Return distinct ranks of a communicator of ``size`` ranks, in their order."""
    ranks = [rank(f"{name}[{place}]", each, size) for place, each in enumerate(sequence(name, value, "a list of ranks"))]
    if len(set(ranks)) != len(ranks):
        refuse(name, value, "a list that has each rank once")
    return ranks


def split_sizes(name: str, value: object, size: int) -> list[int]:
    """Return numbers of rows, one for each of ``size`` ranks."""
    wanted = f"a list of {size} numbers of rows, one for each rank"
    sizes = sequence(name, value, wanted)
    if len(sizes) != size:
        refuse(name, value, wanted)
    return [
        integer(f"{name}[{place}]", each, 0, 2**63 - 1, "a number of rows, an integer of at least 0")
        for place, each in enumerate(sizes)
    ]


def tag(value: object) -> int:
    """Return the tag of a message."""
    if type(value) is int and 0 <= value < TAGS:
        return value
    return integer("tag", value, 0, TAGS - 1, "an integer from 0 to 2^32 - 1")


def flag(name: str, value: object) -> bool:
    """Return a truth value: a bool, or NumPy's."""
    if isinstance(value, bool):
        return value
    if type(value).__name__ in ("bool", "bool_") and type(value).__module__ == "numpy":
        return bool(value)
    refuse(name, value, "True or False")


def optional_flag(name: str, value: object) -> bool | None:
    """Return a truth value, or None."""
    return None if value is None else flag(name, value)


def seconds(value: object, name: str = "timeout") -> float:
    """Return a length of time in seconds; it may be infinite."""
    number = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(number, bool) or not isinstance(number, Real):
        refuse(name, value, "a timedelta or a number of seconds, at least 0")
    if not number >= 0:  # type: ignore[operator]
        refuse(name, value, "a timedelta or a number of seconds, at least 0")
    try:
        return float(number)
    except OverflowError:  # an integer
        return math.inf


def optional_seconds(value: object, name: str = "timeout") -> float | None:
    """Return a length of time in seconds, or None for the default."""
    return None if value is None else seconds(value, name)


def text(name: str, value: object, wanted: str = "a string", limit: int = 1024, empty: bool = False) -> str:
    """Return a string of at most ``limit`` characters that can be written as UTF-8; an empty one only if ``empty``."""
    if not isinstance(value, str) or (not value and not empty):
        refuse(name, value, wanted if empty or value != "" else f"{wanted} that is not empty")
    if len(value) > limit:
        refuse(name, value, f"{wanted} of at most {limit} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        refuse(name, value, f"{wanted} that can be written as UTF-8")
    return value


def octets(name: str, value: object) -> bytes:
    """Return bytes, of any object that is like them."""
    if not isinstance(value, (bytes, bytearray, memoryview)):
        refuse(name, value, "bytes")
    return bytes(value)


def key(value: object) -> str:
    """Return the key of a store."""
    if not isinstance(value, str):
        refuse("key", value, "a string")
    return value


def port(value: object, low: int = 0) -> int:
    """Return a port of TCP; 0, where ``low`` allows it, is one that the system chooses."""
    return integer("port", value, low, 65535, f"a port, an integer from {low} to 65535")


def path(name: str, value: object) -> str:
    """Return the path of a file."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        refuse(name, value, "a path, as a string or an os.PathLike")
    found = os.fspath(value)
    if not found or "\0" in found:
        refuse(name, value, "a path, as a string or an os.PathLike")
    return found


def sequence(name: str, value: object, wanted: str = "a list") -> list[Any]:
    """Return the entries of a list, a tuple or another sequence, which is no string; also those of an array of one dimension."""
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping)):
        refuse(name, value, wanted)
    if not isinstance(value, (Sequence, range)) and getattr(value, "ndim", None) != 1:
        refuse(name, value, wanted)
    return list(value)  # type: ignore[call-overload,no-any-return]


def tensor_list(name: str, value: object, size: int) -> Sequence[Any]:
    """Return a list or tuple of tensors, one for each of ``size`` ranks, as it is. Its entries are checked natively."""
    if not isinstance(value, (list, tuple)) or len(value) != size:
        have = f" of {len(value)}" if isinstance(value, (list, tuple)) else ""
        raise InvalidArgument(
            f"{name} must be a list of {size} tensors, one for each rank, and is {'a ' if have else ''}{type(value).__name__}{have}"
        )
    return value


def object_list(name: str, value: object, size: int | None = None, filled: bool = True) -> Any:
    """Return a list of objects, of ``size`` entries if that is given; if ``filled`` by the call, a sequence that can be changed."""
    count = "" if size is None else f" of {size} objects, one for each rank"
    kind = MutableSequence if filled else Sequence
    if not isinstance(value, kind) or isinstance(value, (str, bytes, bytearray)):
        refuse(name, value, f"a list{count}")
    if size is not None and len(value) != size:
        refuse(name, value, f"a list{count}")
    return value


def string_mapping(name: str, value: object) -> dict[str, str]:
    """Return a mapping of strings to strings as a dict; an empty one for None."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        refuse(name, value, "a mapping of strings to strings")
    given = dict(value)
    for key, entry in given.items():
        if not isinstance(key, str):
            refuse(f"a key of {name}", key, "a string")
        if not isinstance(entry, str):
            refuse(f"{name}[{key!r}]", entry, "a string")
    return given


def instance(name: str, value: object, kind: type, wanted: str) -> None:
    """Require an object of class ``kind``."""
    if not isinstance(value, kind):
        refuse(name, value, wanted)


__all__ = [
    "TAGS",
    "Timeout",
    "flag",
    "instance",
    "integer",
    "key",
    "object_list",
    "octets",
    "optional_flag",
    "optional_seconds",
    "path",
    "port",
    "rank",
    "rank_list",
    "refuse",
    "seconds",
    "sequence",
    "shown",
    "split_sizes",
    "string_mapping",
    "tag",
    "tensor_list",
    "text",
]
