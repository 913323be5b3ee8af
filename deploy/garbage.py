"""A server's collections of garbage, so that they stop it for less than anybody notices.

By CPython's defaults a server with 500 event streams walks its whole heap every two to three seconds, which takes a fifth of
a second [measured], and that is what the slowest hundredth of all events waited for. Nearly all that it lets go of is freed
by counting references; what is left to collect is little.
"""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 2_000, 10, 100
"""Objects more than were freed, until the youngest are walked; how often that is, until the middle ones are; and the oldest.
So two million objects that were kept lie between two walks of the whole heap: a few hundred megabytes, if all were garbage."""


def settle() -> None:
    """To be called once a server is ready to serve: what it is made of is never walked again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
