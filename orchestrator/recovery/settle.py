"""What a broken generation had committed: one pure function of its reports (design: the settlement table)."""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.domain.generation import Answer, Disagrees, RankReport, Settlement
from orchestrator.domain.ids import Device, Generation, Step


def settle(
    generation: Generation,
    committed: Step,
    last_answer: Answer | None,
    reports: Mapping[Device, RankReport],
    doubted: Generation = Generation(0),
) -> Settlement:
    """The step everybody continues from, never below `committed`, and who holds it whole.

    If anybody passed the vote for s, then every holder has the complete gradient of s, and s is committed. If nobody did,
    s is run again: whoever had only voted goes on from s-1, which it still holds. Where an owner and its mirror disagree,
    which of them is wrong is not known, nor what it has spoiled since: nobody holds anything then. Nor does
    whoever was told nothing since and still has what it had: doubted is the newest generation whose memory is not believed.
    """
    answers = [report.answer for report in reports.values() if report.answer and _is_of(report, generation)]
    newest = max(answers, key=lambda answer: answer.step, default=last_answer)
    step = max(committed, newest.step if newest else Step(0))
    answer = next((a for a in (newest, last_answer) if a is not None and a.step == step), None)
    is_distrusted = any(isinstance(r.found, Disagrees) and r.found.about == "state" for r in reports.values())
    holders = tuple(
        (device, report.held.generation)
        for device, report in sorted(reports.items())
        if report.held is not None and _can_reach(report, step, answer) and not is_distrusted and _is_after(report, doubted)
    )
    arrived = tuple(
        (device, report.arrived.intervals)
        for device, report in sorted(reports.items())
        if report.arrived is not None and report.arrived.step == step and not is_distrusted and _is_after(report, doubted)
    )
    return Settlement(
        generation=generation, step=step, answer=answer, holders=holders, is_distrusted=is_distrusted, arrived=arrived
    )


def _is_of(report: RankReport, generation: Generation) -> bool:
    """Whether its answer is a vote of this generation.

    What passed in an earlier one is settled, and so is what a generation began with: where that was rolled back since, it
    must not come true again. Who holds nothing may have been told a step by a generation in which it restored nothing.
    """
    if report.answered_in is not None:
        return report.answered_in == generation
    return report.held is None or report.held.generation == generation  # said by a host of an earlier version


def _is_after(report: RankReport, doubted: Generation) -> bool:
    """Whether it has been told to restore since; of who holds nothing nobody knows."""
    return not doubted or (report.held is not None and report.held.generation > doubted)


def _can_reach(report: RankReport, step: Step, answer: Answer | None) -> bool:
    assert report.held is not None
    if report.held.step == step:
        return True
    # Voted and not updated: its reduced gradient of `step` is complete, it only has to apply the recorded answer.
    return report.held.step == step - 1 and report.voted == step and answer is not None
