"""Why a rank left, a generation or this life: read from what was raised, without what libraries wrapped around it."""

from __future__ import annotations

import traceback

from .findings import Found
from .parallel.forming import NotFormed
from .parallel.group import Aborted, PeerLost


def why_left(error: BaseException) -> Aborted | PeerLost | NotFormed | Found | None:
    """What ended the generation, through whatever a library wrapped around it; None where the program itself raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Aborted | PeerLost | NotFormed | Found):
            return seen
        seen = seen.__cause__ or seen.__context__
    return None


def programs_own(error: BaseException) -> BaseException:
    """What the program raised, without what torch's pipelining wrapped around it."""
    while error.__cause__ is not None and error.__traceback__ is not None:
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        if not str(frame.f_globals.get("__name__", "")).startswith("torch."):
            break
        error = error.__cause__
    return error


def exit_code(error: BaseException) -> int:
    """Of a process that ends with this error, as Python's own would."""
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def in_one_line(error: BaseException) -> str:
    """For people: what was raised and the first line it says, 1000 characters at most."""
    if isinstance(error, SystemExit):
        return f"the training program called sys.exit({error.code!r}) before the last step"
    first = str(error).strip().splitlines()
    return f"{type(error).__name__}: {first[0] if first else 'no message'}"[:1000]
