"""What was written once stays readable: golden files hold one of every stored and every sent value.

`python -m tests.unit.test_codec` writes golden files that are not there yet; one that is there is never changed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from orchestrator.domain import codec
from orchestrator.domain.admission import Admission
from orchestrator.domain.cluster import Node
from orchestrator.domain.cordon import Cordon
from orchestrator.domain.effects import Effect, Sabotage
from orchestrator.domain.events import CheckpointNow, HistoryEntry, HostHeard, Input, StepRecord
from orchestrator.domain.failure import Failure
from orchestrator.domain.faults import FaultKind, FaultRequested, Injected
from orchestrator.domain.generation import RankReport, Settlement
from orchestrator.domain.host_events import Envelope, FaultCarriedOut, HostEvent, JoinerAt, JoinFailed
from orchestrator.domain.ids import Device, JobId, NodeId
from orchestrator.domain.job import JobRecord
from orchestrator.domain.origin import Restore
from orchestrator.domain.quarantine import Quarantine
from orchestrator.domain.queue import Project, Waiting
from orchestrator.domain.requests import BeginJoin, EndJoin, HostRequest, InjectFault, SaveSoon, StopAfter
from orchestrator.domain.state import JobState, Join, Probing, Succeeded
from tests import (
    admitted,
    balanced,
    believed,
    copied,
    doubts,
    evaluated,
    journals,
    kept_secrets,
    moved,
    owned,
    paused,
    planned,
    queued,
    samples,
    struck,
)

GOLDEN = Path(__file__).parent.parent / "golden"
FILES: dict[str, tuple[Any, Sequence[object]]] = {
    "states-1": (JobState, samples.STATES),
    "records-1": (JobRecord, samples.RECORDS),
    "effects-1": (Effect, samples.EFFECTS),
    "inputs-1": (Input, samples.INPUTS),
    "requests-1": (HostRequest, samples.REQUESTS),
    "envelopes-1": (Envelope, samples.ENVELOPES),
    "history-1": (HistoryEntry, samples.HISTORY),
    "steps-1": (StepRecord, samples.STEP_RECORDS),
    "failures-1": (Failure, samples.FAILURES),
    "looking-requests-1": (HostRequest, samples.LOOKING_REQUESTS),
    "looking-events-1": (HostEvent, samples.LOOKING_EVENTS),
    "looking-records-1": (JobRecord, samples.LOOKING_RECORDS),
    "endings-1": (HostEvent, samples.ENDINGS),
    "exact-1": (Restore, samples.EXACT_RESTORES),
    "mixed-1": (Restore, samples.MIXED_RESTORES),
    "nodes-1": (tuple[Node, ...], (samples.NODES,)),
    "heard-1": (HostHeard, samples.HEARD),
    "asked-1": (CheckpointNow | SaveSoon, samples.ASKED),
    "starts-1": (Input, samples.STARTS),
    "doubt-requests-1": (HostRequest, doubts.REQUESTS),
    "doubt-events-1": (HostEvent, doubts.HOST_EVENTS),
    "doubt-inputs-1": (Input, doubts.INPUTS),
    "doubt-reports-1": (RankReport, doubts.REPORTS),
    "doubt-settlements-1": (Settlement, doubts.SETTLEMENTS),
    "quarantine-1": (tuple[Quarantine, ...], (doubts.QUARANTINES,)),
    "faults-1": (InjectFault | FaultCarriedOut | Sabotage | Injected, samples.FAULTS),
    "savings-1": (HostEvent, samples.SAVINGS),
    "saved-effects-1": (Effect, believed.EFFECTS),
    "saved-records-1": (JobRecord, (believed.RECORD,)),
    "saved-inputs-1": (Input, believed.INPUTS),
    "saved-reports-1": (RankReport, believed.REPORTS),
    "journal-requests-1": (HostRequest, journals.REQUESTS),
    "journal-events-1": (HostEvent, journals.HOST_EVENTS),
    "journal-reports-1": (RankReport, journals.REPORTS),
    "journal-records-1": (JobRecord, (journals.RECORD,)),
    "copied-events-1": (HostEvent, copied.HOST_EVENTS),
    "copied-records-1": (JobRecord, (copied.RECORD,)),
    "owned-inputs-1": (Input, owned.INPUTS),
    "asked-by-inputs-1": (Input, owned.ASKED),
    "asked-by-states-1": (JobState, owned.STATES),
    "owned-records-1": (JobRecord, (owned.RECORD,)),
    "secret-requests-1": (HostRequest, kept_secrets.REQUESTS),
    "secret-records-1": (JobRecord, (kept_secrets.RECORD,)),
    "moved-inputs-1": (Input, moved.INPUTS),
    "moved-records-1": (JobRecord, (moved.RECORD,)),
    "paused-inputs-1": (Input, paused.INPUTS),
    "paused-states-1": (JobState, paused.STATES),
    "paused-requests-1": (HostRequest, paused.REQUESTS),
    "paused-records-1": (JobRecord, (paused.RECORD,)),
    "queued-inputs-1": (Input, queued.INPUTS),
    "queued-records-1": (JobRecord, (queued.RECORD,)),
    "projects-1": (tuple[Project, ...], (queued.PROJECTS,)),
    "queue-1": (tuple[Waiting, ...], (queued.QUEUE,)),
    "cordons-1": (tuple[Cordon, ...], (moved.CORDONS,)),
    "balanced-effects-1": (Effect, balanced.EFFECTS),
    "balanced-events-1": (HostEvent, balanced.HOST_EVENTS),
    "balanced-steps-1": (StepRecord, (balanced.STEP_RECORD,)),
    "balanced-records-1": (JobRecord, (balanced.RECORD,)),
    "evaluated-events-1": (HostEvent, evaluated.HOST_EVENTS),
    "evaluated-records-1": (JobRecord, (evaluated.RECORD,)),
    "planned-effects-1": (Effect, planned.EFFECTS),
    "planned-states-1": (JobState, planned.STATES),
    "instants-1": (Input, admitted.INSTANTS),
    "admissions-1": (tuple[Admission, ...], (admitted.ADMISSIONS,)),
    "admitted-inputs-1": (Input, admitted.INPUTS),
    "admitted-effects-1": (Effect, admitted.EFFECTS),
    "struck-effects-1": (Effect, struck.EFFECTS),
    "struck-inputs-1": (Input, struck.INPUTS),
    "told-reports-1": (RankReport, samples.TOLD_REPORTS),
    "joins-1": (
        BeginJoin | StopAfter | EndJoin | JoinerAt | JoinFailed | Join | RankReport | Settlement,
        samples.JOINS,
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_golden_values_decode_equal_and_are_encoded_as_they_were(name: str) -> None:
    wanted, values = FILES[name]
    lines = golden(name)
    assert len(lines) == len(values)
    for line, value in zip(lines, values, strict=True):
        assert codec.loads(wanted, line) == value
        again = codec.dumps(value)
        assert is_within(json.loads(line), json.loads(again)), "a reader of the earlier version would not understand it"
        assert codec.loads(wanted, again) == value and codec.dumps(codec.loads(wanted, again)) == again


@pytest.mark.parametrize("union", [JobState, Effect, Input, HostRequest, HostEvent, Restore], ids=str)
def test_golden_files_hold_one_of_every_kind(union: Any) -> None:
    values = {JobState: samples.STATES, Effect: samples.EFFECTS, Input: samples.INPUTS, HostRequest: samples.REQUESTS}
    values |= {HostEvent: samples.HOST_EVENTS, Restore: samples.RESTORES}
    later = (*samples.LATER, *doubts.REQUESTS, *doubts.HOST_EVENTS, *doubts.INPUTS, *believed.EFFECTS, *believed.INPUTS)
    later += (*moved.INPUTS, *journals.REQUESTS, *copied.HOST_EVENTS, *paused.INPUTS, *paused.STATES, *admitted.INSTANTS)
    later += (*admitted.INPUTS, *admitted.EFFECTS)
    later += (*queued.INPUTS, *struck.EFFECTS, *struck.INPUTS)
    assert {type(value) for value in (*values[union], *later)} >= set(get_args(union))


@pytest.mark.parametrize("name", FILES)
def test_fields_of_a_later_version_are_ignored(name: str) -> None:
    wanted, values = FILES[name]
    for line, value in zip(golden(name), values, strict=True):
        assert codec.decode(wanted, with_unknown_fields(json.loads(line))) == value


def test_missing_fields_take_their_defaults() -> None:
    (data,) = [json.loads(line) for line in golden("records-1")[:1]]
    for name in ("incidents", "outbox", "typical_step_s", "hosts"):
        del data[name]
    record = codec.decode(JobRecord, data)
    assert (record.incidents, record.outbox, record.typical_step_s, record.hosts) == ((), {}, None, frozenset())


def test_faults_are_read_by_the_names_of_the_first_release() -> None:
    old = '{"$":"FaultRequested","fault":"kill_rank","job":"job-1","rank":3,"node":null}'
    assert codec.loads(Input, old) == FaultRequested(fault=FaultKind.KILL, job=JobId("job-1"), rank=3)


@pytest.mark.parametrize(
    ("wanted", "data"),
    [
        (JobState, {"kind": "Exploded"}),
        (JobState, "Probing"),
        (Probing, "Probing"),
        (Succeeded, {"kind": "Succeeded"}),
        (Succeeded, {"kind": "Succeeded", "at": "noon"}),
        (Succeeded, {"kind": "Succeeded", "at": True}),
        (int, True),
        (int, 1.5),
        (tuple[int, str], [1]),
        (Device, "no index"),
    ],
)
def test_other_data_is_undecodable(wanted: Any, data: object) -> None:
    with pytest.raises(codec.Undecodable):
        codec.decode(wanted, data)


def test_floats_and_devices_survive_to_the_bit() -> None:
    for value in (0.1, 1e-308, float("inf"), -0.0, 1 / 3):
        assert repr(codec.loads(float, codec.dumps(value))) == repr(value)
    odd = Device(NodeId("rack/3/node"), 12)
    assert codec.loads(Device, codec.dumps(odd)) == odd


def is_within(old: Any, new: Any) -> bool:
    """Whether `new` says all that `old` says: fields may have been added, none may be gone, renamed or changed."""
    if isinstance(old, dict):
        return isinstance(new, dict) and all(key in new and is_within(item, new[key]) for key, item in old.items())
    if isinstance(old, list):
        return isinstance(new, list) and len(old) == len(new) and all(map(is_within, old, new))
    return bool(old == new)


def with_unknown_fields(data: Any) -> Any:
    if isinstance(data, list):
        return [with_unknown_fields(item) for item in data]
    if isinstance(data, dict):
        grown = {key: with_unknown_fields(item) for key, item in data.items()}
        return {**grown, "from_the_future": {"kind": "New", "x": [1]}} if codec.KIND in data else grown
    return data


def golden(name: str) -> list[str]:
    return (GOLDEN / f"{name}.jsonl").read_text().splitlines()


def test_what_lasts_is_converted_once_and_what_takes_its_place_anew() -> None:
    spec = next(record.spec for record in samples.RECORDS)
    other = replace(spec, name="another")
    first = codec.dumps(spec)
    assert codec.encode(spec) is codec.encode(spec) and codec.dumps(spec) == first
    assert codec.loads(type(spec), codec.dumps(other)) == other and codec.dumps(other) != first


def write_missing() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for name, (_, values) in FILES.items():
        path = GOLDEN / f"{name}.jsonl"
        if not path.exists():
            path.write_text("".join(codec.dumps(value).decode() + "\n" for value in values))
            print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    write_missing()
