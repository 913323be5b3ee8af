"""Why a rank left, a generation or this life: read from what was raised, without what libraries wrapped around it."""

from __future__ import annotations

from torch.distributed import DistBackendError

from .findings import Found
from .parallel.forming import NotFormed
from .parallel.group import Aborted, PeerLost


def why_left(error: BaseException) -> Aborted | PeerLost | NotFormed | Found | None:
    """What ended the generation, through whatever a library wrapped around it; None where the program itself raised."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, Aborted | PeerLost | NotFormed | Found):
            return seen
        if isinstance(seen, DistBackendError):  # nccl's word that a peer or a communicator is gone; it does not say whose
            return Aborted(in_one_line(seen))
        seen = seen.__cause__ or seen.__context__
    return None


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
