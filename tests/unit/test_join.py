"""One machine's membership: whose its state directory is, and what becomes of the token that it was given."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

from deploy import join
from orchestrator.adapters.local_nodes import LocalNodes, NodeSpec
from orchestrator.adapters.mailbox import Mailbox
from orchestrator.adapters.processes import ProcessId
from orchestrator.adapters.ray_cluster import actor_name
from orchestrator.domain.errors import NotFound, Refused, Unavailable
from orchestrator.domain.ids import JobId, NodeId


def test_a_second_one_on_a_state_directory_ends_nothing_of_the_first(tmp_path: Path) -> None:
    with join._alone(tmp_path, 0):
        refused = pytest.raises(Refused, match="another everstep join has its node in")
        with refused, join._alone(tmp_path, 0):
            pass
    with join._alone(tmp_path, 0):
        pass


def test_the_directory_is_taken_until_the_guard_of_a_killed_one_is_done(tmp_path: Path) -> None:
    with join._alone(tmp_path, 0) as held:
        guard = subprocess.Popen(
            [sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE, pass_fds=[held]
        )
    with pytest.raises(Refused), join._alone(tmp_path, 0):
        pass
    guard.communicate()
    with join._alone(tmp_path, 0):
        pass


def test_nothing_that_is_started_finds_the_token_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ) | {join.TOKEN_VARIABLE: "canary\n"})
    nodes = LocalNodes(tmp_path)
    try:
        join._take_token(nodes, None)
        assert nodes.environment.token_file.read_text() == "canary"
        assert "canary" not in "".join(os.environ.values())
    finally:
        nodes.environment.temp_dir.rmdir()


@pytest.mark.parametrize("name", ["../b", "a/b", "", "-a", "a\n"])
def test_a_name_is_one_that_names_logs_and_labels(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["join", "h:1", f"--name={name}", "--state-dir", str(tmp_path / "state")])
    assert join.main() == 2 and not (tmp_path / "state").exists()


def test_hosts_of_two_jobs_are_never_called_the_same() -> None:
    mine = actor_name(JobId("job-x-rack2"), NodeId("h100-1"))
    assert mine != actor_name(JobId("job-x"), NodeId("rack2-h100-1"))


def test_the_state_directory_of_a_cluster_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = LocalNodes(tmp_path)
    nodes._change(lambda registry: replace(registry, head={"gcs": ProcessId(1, 1)}))
    monkeypatch.setattr(sys, "argv", ["join", "127.0.0.1:1", "--name", "n", "--state-dir", str(tmp_path)])
    assert join.main() == 1 and "is a cluster's own" in capsys.readouterr().err
    assert nodes.registry().head and not nodes.environment.token_file.exists()


@pytest.mark.parametrize(
    "error", [Unavailable("away"), NotFound("no node"), OSError("no more processes"), ValueError("odd")]
)
def test_a_check_that_cannot_be_made_takes_no_node_away(error: Exception) -> None:
    nodes, mailbox = mock.Mock(spec=LocalNodes), mock.Mock(spec=join.Mailbox)
    member = join.Member(nodes, "h:1", NodeSpec("cpu", 1), NodeId("n"), Path("/"), 1)
    member._mailbox = mailbox
    mailbox.get.return_value, mailbox.asked_check.side_effect = None, error
    assert member._stays()
    nodes.is_alive.assert_called_once()


def test_a_node_that_ended_is_brought_again_but_not_where_it_has_to_go(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes, mailbox = mock.Mock(spec=LocalNodes), mock.Mock(spec=join.Mailbox)
    member = join.Member(nodes, "h:1", NodeSpec("cpu", 1), NodeId("n"), Path("/"), 1)
    member._mailbox = mailbox
    mailbox.get.side_effect, nodes.is_alive.return_value = Unavailable("away"), False
    mailbox.places_of.return_value = ()
    monkeypatch.setattr(join.time, "sleep", lambda _: None)
    assert member._stays()
    nodes.join.assert_called_once()

    def told_twice(_: float) -> None:
        member._told()
        member._told()

    monkeypatch.setattr(join.time, "sleep", told_twice)
    member._stays()
    nodes.join.assert_called_once()
    assert not member._stays()


@pytest.mark.parametrize(("seen", "joined"), [([("10.0.0.2:41",)], 0), ([(), ("10.0.0.1:40", "10.0.0.2:41")], 1)])
def test_a_name_that_another_machine_has_is_refused_and_its_words_are_left_alone(
    seen: list[tuple[str, ...]], joined: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where both came at the same time."""
    nodes, mailbox = mock.Mock(spec=LocalNodes), mock.Mock(spec=join.Mailbox)
    member = join.Member(nodes, "h:1", NodeSpec("cpu", 1), NodeId("guest"), Path("/"), 1)
    member._mailbox, mailbox.places_of.side_effect = mailbox, seen
    monkeypatch.setattr(join.signal, "signal", mock.Mock())
    monkeypatch.setattr(join.subprocess, "Popen", mock.Mock())
    monkeypatch.setattr(member, "_forget", mock.Mock(side_effect=AssertionError("the other one's")))
    with pytest.raises(Refused, match=r"has a node guest already, at .*10\.0\.0\.2:41; give this machine another --name"):
        member.run(0)
    assert nodes.join.call_count == joined and (joined or not mailbox.delete.called)


def test_a_name_is_free_once_the_machine_that_had_it_says_that_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as lives, socket.create_server(("127.0.0.1", 0)) as closed:
        there, gone = lives.getsockname()[1], closed.getsockname()[1]
        closed.close()

        def row(name: str, port: int, state: int = 0) -> SimpleNamespace:
            return SimpleNamespace(node_name=name, node_manager_address="127.0.0.1", node_manager_port=port, state=state)

        table = [row("guest", there), row("guest", gone), row("guest", there, state=1), row("other", there)]
        mailbox = Mailbox("h:1", _client=mock.Mock(get_all_node_info=lambda: dict(enumerate(table))))
        assert mailbox.places_of(NodeId("guest")) == (f"127.0.0.1:{there}",)
        assert mailbox.places_of(NodeId("another")) == ()
