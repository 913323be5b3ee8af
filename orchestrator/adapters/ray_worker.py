"""Ray's main thread of a host's process is made to sleep: it has nothing to do, and would wake 100 times a second to see.

Each time it takes the interpreter's lock and asks for signals, which costs every node most of a percent of a processor. So
there is one to find, whose handler sleeps. In between the thread hears whoever asks where the host listens, all it is for.
Imported by the worker process before its main thread becomes Ray's (ray_node.py): only there may a handler be installed.
"""

from __future__ import annotations

import signal
import time
from types import FrameType

NAP_S = 0.5
"""How much later a supervisor that starts may learn where a host listens."""
_AWAKE_S = 0.001


def begin_napping() -> None:
    """Any thread."""
    signal.setitimer(signal.ITIMER_REAL, NAP_S)


def _nap(number: int, frame: FrameType | None) -> None:
    time.sleep(NAP_S)
    # Not raised here: it would be handled before this handler has returned.
    signal.setitimer(signal.ITIMER_REAL, _AWAKE_S)


signal.signal(signal.SIGALRM, _nap)
