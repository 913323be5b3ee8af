"""Which release this is."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version


def release() -> str:
    """Of the installed package; "0" where there is none."""
    try:
        return version("everstep")
    except PackageNotFoundError:
        return "0"
