"""What webhooks decide: where a message may go, whom it concerns, how it is signed, and when it is tried again."""

from __future__ import annotations

import json
from dataclasses import replace
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest

from api.client.webhooks import BadSignature, received
from api.hook_shapes import WebhookRequest
from api.redaction import redacted_text
from api.schemas import read
from orchestrator.domain.admission import Admission, Admittance
from orchestrator.domain.cluster import Node, NodeStatus
from orchestrator.domain.errors import Refused
from orchestrator.domain.events import HistoryEntry
from orchestrator.domain.failure import Cause, Fault
from orchestrator.domain.hooks import Attempt, Delivery, Fate, Hook, Occasion, Standing
from orchestrator.domain.ids import Generation, JobId, NodeId
from orchestrator.domain.incident import Incident
from orchestrator.domain.job import JobRecord
from orchestrator.domain.state import Succeeded
from orchestrator.notify import choosing, retrying, signing
from orchestrator.notify.addresses import Reach, is_allowed, target_of
from orchestrator.notify.retrying import Patience
from tests.desk import a_spec

HOOK = Hook(id="wh-1", name="ops", url="https://hooks.example/x", created_at=1.0)
RECORD = JobRecord(
    id=JobId("job-1"), spec=replace(a_spec(), project="nlp", labels={"team": "a"}), state=Succeeded(at=9.0), created_at=1.0
)
DELIVERY = Delivery(id="msg-1", hook="wh-1", occasion=Occasion.PING, at=1.0, body="{}", due_at=1.0)
BAD, GOOD = Attempt(at=2.0, seconds=0.1, code=500, error="it answered 500"), Attempt(at=2.0, seconds=0.1, code=204)


# --- where to ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "0.0.0.0",
        "10.0.0.1",
        "172.16.5.5",
        "192.168.1.1",
        "169.254.169.254",
        "169.254.1.1",
        "100.64.0.1",
        "100.100.100.200",
        "168.63.129.16",
        "192.0.0.192",
        "192.0.2.7",
        "198.18.0.1",
        "224.0.0.1",
        "239.1.1.1",
        "240.0.0.1",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fec0::1",
        "fc00::1",
        "fd00:ec2::254",
        "ff02::1",
        "2001:db8::1",
        "::ffff:127.0.0.1",
        "::ffff:169.254.169.254",
        "::ffff:10.0.0.1",
        "::10.0.0.1",
        "::7f00:1",
        "2002:7f00:1::",
        "2002:a9fe:a9fe::1",
        "64:ff9b::10.0.0.1",
        "64:ff9b::169.254.169.254",
        "64:ff9b:1::10.0.0.1",
        "2001:0:1:1:0:0:80ff:fffe",
    ],
)
def test_addresses_that_are_not_public_are_refused_however_they_are_written(address: str) -> None:
    assert not is_allowed(ip_address(address), Reach())


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_public_addresses_are_allowed(address: str) -> None:
    assert is_allowed(ip_address(address), Reach())


def test_a_network_that_the_configuration_lists_is_allowed_and_no_other() -> None:
    reach = Reach(networks=(ip_network("10.1.2.0/24"), ip_network("fd00::/8")))
    assert all(is_allowed(ip_address(one), reach) for one in ("10.1.2.3", "::ffff:10.1.2.3", "fd00::5"))
    assert not any(is_allowed(ip_address(one), reach) for one in ("10.1.3.3", "127.0.0.1", "fc00::5"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("http://hooks.example/", "must begin with https://"),
        ("ftp://hooks.example/", "must begin with https://"),
        ("file:///etc/passwd", "must begin with https://"),
        ("hooks.example", "must begin with https://"),
        ("https://user:word@hooks.example/", "no user name or password"),
        ("https://word@hooks.example/", "no user name or password"),
        ("https://hooks.example/#part", "after a #"),
        ("https:///x", "must name a host"),
        ("https://hooks.example:0/", "a port of 1..65535"),
        ("https://hooks.example:99999/", "is no URL"),
        ("https://[::1/", "is no URL"),
        ("https://[fe80::1%25eth0]/", "must name a host"),
        ("https://hooks.example\\@10.0.0.1/", "ASCII characters"),
        ("https://hooks.example/ x", "ASCII characters"),
        ("https://hooks.example/\r\nHost: x", "ASCII characters"),
        ("https://höoks.example/", "ASCII characters"),
        ("https://127.0.0.1/", "no public address"),
        ("https://[::ffff:10.0.0.1]/", "no public address"),
        ("https://169.254.169.254/latest/meta-data", "no public address"),
        ("https://hooks.example/" + "x" * 2000, "at most 2000"),
    ],
)
def test_urls_that_could_be_used_against_the_service_are_refused_without_being_repeated(url: str, why: str) -> None:
    with pytest.raises(Refused) as refused:
        target_of(url, Reach())
    assert why in refused.value.message and "word" not in refused.value.message.replace("password", "")


def test_a_url_is_taken_apart_once() -> None:
    found = target_of("https://Hooks.example:8443/a/b?c=d&e=%20", Reach())
    assert (found.host, found.port, found.path, found.authority) == (
        "hooks.example",
        8443,
        "/a/b?c=d&e=%20",
        "hooks.example:8443",
    )
    assert target_of("http://10.1.2.3", Reach(http=True, networks=(ip_network("10.0.0.0/8"),))).path == "/"
    assert target_of("https://[2606:4700::1111]/", Reach()).authority == "[2606:4700::1111]"


# --- signatures ----------------------------------------------------------------------------------------------------------


def test_signatures_are_those_of_standard_webhooks() -> None:
    """The example of its specification."""
    secret, id, body = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "msg_p5jXN8AQM9LWM0D4loKWxJek", b'{"test": 2432232314}'
    assert signing.signature(secret, id, 1614265330, body) == "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="


def test_a_receiver_believes_what_was_signed_lately_with_its_secret_and_nothing_else() -> None:
    secret, other = signing.secret_of(b"s" * 32), signing.secret_of(b"o" * 32)
    made = choosing.ping(HOOK, "key", 1000.0)
    body = made.body.encode()
    sent = {name.title(): value for name, value in signing.headers(secret, made.id, 1000, body).items()}
    event = received(sent, body, secret, now=1100.0)
    assert (event.id, event.type, event.data["webhook"]) == (made.id, "ping", "wh-1")
    for wrong in (
        lambda: received(sent, body + b" ", secret, now=1100.0),
        lambda: received(sent, body, other, now=1100.0),
        lambda: received(sent, body, secret, now=1400.0),
        lambda: received(sent, body, secret, now=600.0),
        lambda: received(sent | {"Webhook-Id": "msg-2"}, body, secret, now=1100.0),
        lambda: received(sent | {"Webhook-Timestamp": "1001"}, body, secret, now=1100.0),
        lambda: received({}, body, secret, now=1100.0),
    ):
        with pytest.raises(BadSignature):
            wrong()
    assert secret not in redacted_text(f"it is {secret}, and more")


# --- whom ----------------------------------------------------------------------------------------------------------------


def entry(type: str, status: str = "RUNNING", message: str = "said", **data: object) -> HistoryEntry:
    return HistoryEntry(job=RECORD.id, at=5.0, type=type, message=message, status=status, data=data)


@pytest.mark.parametrize(
    ("said", "occasion"),
    [
        (entry("submitted", "PENDING"), Occasion.JOB_SUBMITTED),
        (entry("queued", "PENDING"), Occasion.JOB_QUEUED),
        (entry("running"), Occasion.JOB_RUNNING),
        (entry("at_risk"), Occasion.JOB_AT_RISK),
        (entry("ended", "SUCCEEDED"), Occasion.JOB_SUCCEEDED),
        (entry("ended", "FAILED"), Occasion.JOB_FAILED),
        (entry("ended", "CANCELLED"), Occasion.JOB_CANCELLED),
        (entry("generation_closing", cause=Cause.NODE_LOST), Occasion.JOB_INTERRUPTED),
        (entry("generation_closing", cause="node_lost"), Occasion.JOB_INTERRUPTED),
        (entry("generation_closing", cause=Cause.GROW.value), None),
        (entry("recovered", incident=1), Occasion.JOB_RECOVERED),
        (entry("recovered", incident=2), None),
        (entry("settled"), None),
        (entry("checkpoint"), None),
    ],
)
def test_what_people_are_told_of(said: HistoryEntry, occasion: Occasion | None) -> None:
    incidents = tuple(
        Incident(number=number, fault=Fault(cause=cause, message="", at=1.0), generation=Generation(number))
        for number, cause in ((1, Cause.RANK_LOST), (2, Cause.GROW))
    )
    news = choosing.of_entry("7", said, replace(RECORD, incidents=incidents))
    assert (news.occasion if news else None) == occasion


@pytest.mark.parametrize(
    ("changes", "is_told"),
    [
        ({}, True),
        ({"occasions": (Occasion.JOB_FAILED, Occasion.JOB_AT_RISK)}, True),
        ({"occasions": (Occasion.JOB_SUCCEEDED,)}, False),
        ({"projects": ("nlp", "other")}, True),
        ({"projects": ("other",)}, False),
        ({"labels": {"team": "a"}}, True),
        ({"labels": {"team": "b"}}, False),
        ({"labels": {"team": "a", "x": "y"}}, False),
    ],
)
def test_a_hook_is_told_of_its_events_projects_and_labels(changes: dict[str, object], is_told: bool) -> None:
    news = choosing.of_entry("7", entry("ended", "FAILED"), RECORD)
    assert news is not None and choosing.wants(replace(HOOK, **changes), news) == is_told  # type: ignore[arg-type]


def test_a_message_says_what_happened_to_which_job_and_is_the_same_however_often_it_is_made() -> None:
    news = choosing.of_entry("7", entry("ended", "FAILED", "x" * 5000), RECORD)
    assert news is not None
    made, again = choosing.delivery(HOOK, news, 8.0), choosing.delivery(HOOK, news, 9.0)
    assert made.id == again.id and made.body == again.body
    assert choosing.delivery(replace(HOOK, id="wh-2"), news, 8.0).id != made.id
    said = json.loads(made.body)
    assert said["type"] == "job.failed" and said["timestamp"] == "1970-01-01T00:00:05+00:00"
    whose = {"id": "job-1", "name": "byte-gpt", "project": "nlp", "labels": {"team": "a"}, "user": None}
    assert said["data"]["job"] == whose
    assert len(said["data"]["message"]) == choosing.MAX_WORDS and said["data"]["status"] == "FAILED"


def test_nodes_that_are_lost_or_refused_are_told_once_and_not_on_the_first_look() -> None:
    one, two = (Node(id=NodeId(name), kind="A100", num_devices=2, life="1") for name in ("n1", "n2"))
    lost = replace(one, status=NodeStatus.LOST)
    refused = Admission(node=NodeId("n2"), since=4.0, standing=Admittance.REFUSED, why="its disk is slow")
    seen, news = choosing.of_nodes(None, (lost, two), (refused,), 5.0)
    assert news == []
    seen, news = choosing.of_nodes(None, (one, two), (), 5.0)
    seen, news = choosing.of_nodes(seen, (lost, two), (refused,), 6.0)
    assert [(item.occasion, item.data["node"]) for item in news] == [
        (Occasion.NODE_LOST, "n1"),
        (Occasion.NODE_REFUSED, "n2"),
    ]
    assert "its disk is slow" in news[1].data["message"]
    seen, news = choosing.of_nodes(seen, (lost, two), (refused,), 7.0)
    assert news == []
    seen, _ = choosing.of_nodes(seen, (replace(one, life="2"), two), (), 8.0)
    seen, news = choosing.of_nodes(seen, (replace(one, life="2", status=NodeStatus.LOST), two), (), 9.0)
    assert [item.occasion for item in news] == [Occasion.NODE_LOST], "another life is another loss"
    leaving = replace(two, leaving=True, status=NodeStatus.LOST)
    assert choosing.of_nodes(seen, (leaving,), (), 10.0)[1] == [], "it has asked to leave"
    news = choosing.of_nodes(seen, (replace(two, status=NodeStatus.LOST),), (), 10.0)[1]
    assert choosing.wants(HOOK, news[0]) and not choosing.wants(replace(HOOK, projects=("nlp",)), news[0])


# --- when again ----------------------------------------------------------------------------------------------------------


def test_a_delivery_is_tried_again_at_growing_intervals_then_given_up() -> None:
    patience, delivery, standing, waits = Patience(attempts=5, longest_wait_s=100.0), DELIVERY, Standing(), []
    for now in (10.0, 20.0, 30.0, 40.0):
        delivery, standing = retrying.tried(delivery, standing, BAD, patience, now, 1.0)
        assert delivery.fate is Fate.PENDING and delivery.due_at is not None and standing.failures == 0
        waits.append(delivery.due_at - now)
    assert waits == [5.0, 20.0, 80.0, 100.0]
    delivery, standing = retrying.tried(delivery, standing, BAD, patience, 50.0, 1.0)
    assert (delivery.fate, delivery.due_at, standing.failures, len(delivery.attempts)) == (Fate.FAILED, None, 1, 5)
    again = retrying.again(delivery, 60.0)
    assert (again.fate, again.tries, again.due_at, len(again.attempts)) == (Fate.PENDING, 0, 60.0, 5)
    assert patience.wait_s(1, 0.0) == 2.5, "between a half and the whole"


def test_a_hook_is_paused_after_failures_in_a_row_and_says_why() -> None:
    patience, standing = Patience(attempts=1, max_failures=3), Standing()
    for number in range(3):
        assert standing.paused_at is None and standing.failures == number
        _, standing = retrying.tried(DELIVERY, standing, BAD, patience, 10.0 + number, 0.5)
    assert standing.paused_at == 12.0 and "3 deliveries in a row" in standing.why and "answered 500" in standing.why
    _, fine = retrying.tried(DELIVERY, Standing(failures=2), GOOD, patience, 20.0, 0.5)
    assert (fine.failures, fine.delivered_at, fine.paused_at) == (0, 20.0, None)


def test_a_receiver_that_is_gone_is_asked_no_more() -> None:
    delivery, standing = retrying.tried(DELIVERY, Standing(), replace(BAD, code=410), Patience(), 10.0, 0.5)
    assert delivery.fate is Fate.FAILED and standing.paused_at == 10.0 and "410" in standing.why


def test_the_page_for_receivers_names_every_event() -> None:
    page = (Path(__file__).parents[2] / "docs" / "webhooks.md").read_text()
    assert [one.value for one in Occasion if f"`{one.value}`" not in page] == []


def test_events_of_the_cluster_go_with_no_filter_of_jobs() -> None:
    with pytest.raises(Refused, match="about the whole cluster"):
        read(WebhookRequest, {"name": "a", "url": "https://x.example", "events": ["node.lost"], "labels": {"team": "a"}})
    with pytest.raises(Refused, match="ping"):
        read(WebhookRequest, {"name": "a", "url": "https://x.example", "events": ["ping"]})
    with pytest.raises(Refused, match="events"):
        read(WebhookRequest, {"name": "a", "url": "https://x.example", "events": ["job.exploded"]})
