"""One exception for each code of the service.

docs/api.md tells which situation has which code, and what a host does about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Missing(NamedTuple):
    """What a sequence has lost of a layer: positions ``[begin, end)``, in order, the first hundred ranges."""

    sequence: int
    layer: int
    ranges: list[tuple[int, int]]


class TributaryError(Exception):
    """A call that was refused or failed.

    Attributes
    ----------
    code : str
        The code's name, ``"OUT_OF_RANGE"``.
    field : str
        Path of the field that was refused, ``"entries[2].first_position"``; ``""`` when none is named.
    retry_after : float or None
        Seconds after which the service asks for a repetition.
    length : int or None
        Tokens held, where a position lies beyond them.
    missing : Missing or None
        Of ``DataLoss``: what `append` may bring again. None: nothing of the sequence is left.
    """

    code = "UNKNOWN"

    def __init__(
        self,
        message: str,
        field: str = "",
        retry_after: float | None = None,
        length: int | None = None,
        missing: Missing | None = None,
    ) -> None:
        super().__init__(message)
        self.field = field
        self.retry_after = retry_after
        self.length = length
        self.missing = missing


class Cancelled(TributaryError):
    """The client was closed."""

    code = "CANCELLED"


class Unknown(TributaryError):
    """Something that no other exception says."""


class InvalidArgument(TributaryError, ValueError):
    """A shape, dtype, size or count is wrong; ``field`` names it."""

    code = "INVALID_ARGUMENT"


class DeadlineExceeded(TributaryError, TimeoutError):
    """No answer in time. The outcome is unknown: repeat the call as it was."""

    code = "DEADLINE_EXCEEDED"


class NotFound(TributaryError, LookupError):
    """An unknown cache or sequence."""

    code = "NOT_FOUND"


class AlreadyExists(TributaryError):
    """Other bytes at a position that is held, or another spec under a cache's id."""

    code = "ALREADY_EXISTS"


class PermissionDenied(TributaryError, PermissionError):
    """The role of this client does not allow the call."""

    code = "PERMISSION_DENIED"


class ResourceExhausted(TributaryError):
    """No free pages, no memory, a message too large, or a limit. Nothing was changed."""

    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(TributaryError):
    """Nothing in the service can do it; the message lists the reasons."""

    code = "FAILED_PRECONDITION"


class Aborted(TributaryError):
    """The step did not complete. Repeat the call as it was, after ``retry_after``."""

    code = "ABORTED"


class OutOfRange(TributaryError, IndexError):
    """A position beyond the end (``length`` is where that is), or one that a window gave up."""

    code = "OUT_OF_RANGE"


class Unimplemented(TributaryError):
    """The service does not know the call."""

    code = "UNIMPLEMENTED"


class Internal(TributaryError):
    """A defect. Nothing of the call was kept."""

    code = "INTERNAL"


class Unavailable(TributaryError, ConnectionError):
    """Nobody answers, or the workers are forming their group. Repeat after ``retry_after``."""

    code = "UNAVAILABLE"


class DataLoss(TributaryError):
    """Workers that held tokens of the sequence are gone: append those in ``missing`` again, or reopen the sequence."""

    code = "DATA_LOSS"


class Unauthenticated(TributaryError):
    """The service does not know who calls."""

    code = "UNAUTHENTICATED"


def refused(field: str, what: str) -> InvalidArgument:
    """An argument that is not what it must be."""
    return InvalidArgument(f"{field}: {what}", field)


# By number, from CANCELLED (1) on.
_BY_NUMBER: tuple[type[TributaryError], ...] = (
    Cancelled,
    Unknown,
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Aborted,
    OutOfRange,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
)


def of_code(
    code: int,
    message: str,
    field: str,
    retry_delay_ms: int,
    length: int,
    lost_sequence: int = 0,
    lost_layer: int = 0,
    missing: Sequence[tuple[int, int]] = (),
) -> TributaryError:
    """The exception of a code's number, for the extension module; -1 and () stand for what is not said."""
    kind = _BY_NUMBER[code - 1] if 1 <= code <= len(_BY_NUMBER) else Unknown
    return kind(
        message,
        field,
        retry_delay_ms / 1000 if retry_delay_ms >= 0 else None,
        length if length >= 0 else None,
        Missing(lost_sequence, lost_layer, list(missing)) if missing else None,
    )
