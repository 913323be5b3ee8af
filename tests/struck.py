"""Samples of what is stored and told about nodes that are killed on purpose, for golden files and round trips."""

from __future__ import annotations

from orchestrator.domain.effects import Effect, StrikeNode
from orchestrator.domain.events import Input, NodeStruck

from .samples import JOB, OTHER

EFFECTS: tuple[Effect, ...] = (StrikeNode(job=JOB, node=OTHER),)
INPUTS: tuple[Input, ...] = (NodeStruck(node=OTHER), NodeStruck(node=OTHER, refused="there is no node b"))
