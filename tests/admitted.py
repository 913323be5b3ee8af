"""Samples of what is stored and sent about nodes that are checked, for golden files and round trips."""

from __future__ import annotations

from orchestrator.domain.events import Input, InstantCame

INSTANTS: tuple[Input, ...] = (InstantCame(key="goes:n-1:9.0"),)
