"""Who a job's processes are on a machine, what is in their reach, and what becomes of what they leave."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest

from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, Refused
from orchestrator.domain.spec import DataSpec
from tests.served import eventually
from worker import lodging
from worker.confinement import Cell, may_show_views
from worker.data import sources
from worker.lodging import Lodging, Policy, lodged

as_root = pytest.mark.skipif(os.geteuid() != 0 or not may_show_views(), reason="only root can make itself somebody else")
ENTERS = """
import json, os, resource, sys
from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError
from worker.confinement import Cell, enter

def tried(path):
    try:
        return open(path).read()
    except OSError as error:
        return error.strerror

try:
    enter(codec.loads(Cell, sys.argv[1]))
except EverstepError as error:
    sys.exit(str(error))
"""


def entered(cell: Cell, then: str, *before: str, **more: Any) -> subprocess.CompletedProcess[str]:
    """What a process that makes itself this says. before: words before its command."""
    command = [*before, sys.executable, "-c", ENTERS + textwrap.dedent(then), codec.dumps(cell).decode()]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **cell.environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, **more)


def test_what_a_machine_is_told_is_read_and_nonsense_refused() -> None:
    assert Policy.of({}) == Policy()
    said = {"USER": "service", "USER_IDS": "7-9", "MAX_OPEN_FILES": "12", "MAX_PROCESSES": "0", "MAX_MEMORY_GIB": "2"}
    found = Policy.of({f"EVERSTEP_JOBS_{name}": value for name, value in said.items()})
    assert found == Policy(
        user="service", first_id=7, last_id=9, max_open_files=12, max_processes=0, max_memory_bytes=2 << 30
    )
    for name, value in (("USER", "root"), ("USER_IDS", "0-9"), ("USER_IDS", "9-7"), ("MAX_PROCESSES", "many")):
        with pytest.raises(EverstepError, match=f"EVERSTEP_JOBS_{name} is '{value}'"):
            Policy.of({f"EVERSTEP_JOBS_{name}": value})


def test_where_it_is_told_so_a_job_runs_as_the_service_does() -> None:
    with lodged(Policy(user="service"), "job-1") as cell:
        assert not cell.is_apart and cell.environment == {"TMPDIR": cell.home}
        asked = (
            "print(json.dumps([os.getuid(), resource.getrlimit(resource.RLIMIT_NOFILE)[1], tried('/proc/self/status')]))"
        )
        user, files, status = json.loads(entered(cell, asked).stdout)
    assert user == os.getuid() and files == min(65536, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    assert "NoNewPrivs:\t1" in status
    assert not Path(cell.home).exists()


@as_root
def test_a_number_is_one_jobs_until_it_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lodging, "USERS", tmp_path / "users")
    policy = Policy(first_id=60600, last_id=60601)
    one, two = Lodging(policy, "job-1"), Lodging(policy, "job-2")
    assert {one.cell.user, two.cell.user} == {60600, 60601}
    assert Path(one.cell.home).stat().st_uid == one.cell.user
    with pytest.raises(EverstepError, match=r"all 2 numbers of jobs.user_ids \(60600-60601\) are taken"):
        Lodging(policy, "job-3")
    beside = Lodging(policy, "job-1")
    assert beside.cell.user == one.cell.user and beside.cell.home != one.cell.home, "another host of the same job"
    beside.leave()
    with pytest.raises(EverstepError):
        Lodging(policy, "job-3")
    one.leave()
    again = Lodging(policy, "job-1")
    assert again.cell.user == one.cell.user
    again.leave()
    two.leave()


@as_root
def test_what_a_job_needs_is_found_below_closed_folders_and_nothing_else_is(tmp_path: Path) -> None:
    state = tmp_path / "state"
    kept, deep = state / "jobs" / "job-1" / "checkpoints", state / "shut" / "data"
    for folder in (kept, deep):
        folder.mkdir(parents=True)
        (folder / "file").write_text("needed")
    (kept.parent.parent / "other").write_text("another's")
    (state / "admin.token").write_text("the owner's")
    state.chmod(0o700)
    (state / "shut").chmod(0o700)
    with lodged(Policy(), "job-1", (str(kept), str(deep / "file"))) as cell:
        asked = f"""
        import colorsys, subprocess
        paths = [{str(kept / "file")!r}, {str(deep / "file")!r}, {str(state / "admin.token")!r},
                 {str(kept.parent.parent / "other")!r}, '/proc/{os.getpid()}/environ', '/etc/shadow']
        found = [tried(path) for path in paths]
        same = subprocess.run([sys.executable, "-c", "import os, sys, tempfile; tempfile.mkdtemp(); print(os.getuid())"],
                              capture_output=True, text=True)
        print(json.dumps([os.getuid(), os.getgid(), os.getgroups(), found, same.stdout.strip() or same.stderr]))
        """
        done = entered(cell, asked, cwd=state)
        assert done.returncode == 0, done.stderr
        user, group, groups, found, same = json.loads(done.stdout)
    assert (user, group, groups, same) == (cell.user, cell.user, [], str(cell.user))
    assert found[:2] == ["needed", "needed"]
    assert set(found[2:]) <= {"No such file or directory", "Permission denied"}, found
    assert (state / "admin.token").read_text() == "the owner's", "nothing has changed for anybody else"


@as_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="setpriv takes a right away")
def test_without_the_right_to_show_it_what_is_closed_is_named_with_the_ways_out(tmp_path: Path) -> None:
    (tmp_path / "shut").mkdir(mode=0o700)
    (tmp_path / "shut" / "file").write_text("needed")
    with lodged(Policy(), "job-1", (str(tmp_path / "shut" / "file"),)) as cell:
        done = entered(cell, "", "setpriv", "--bounding-set", "-sys_admin")
    assert done.returncode == 1 and f"jobs run as user {cell.user} here" in done.stderr
    assert "chmod a+x" in done.stderr and "set jobs.user to service" in done.stderr


@as_root
def test_limits_hold_and_are_not_lifted_again() -> None:
    cell = Cell(user=60610, home="/tmp", max_open_files=50, max_processes=30, max_memory_bytes=1 << 28)
    asked = """
    found = [resource.getrlimit(kind) for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_CORE)]
    said = []
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_DATA):
        try:
            resource.setrlimit(kind, (1 << 40, 1 << 40))
        except ValueError:
            said.append("refused")
    try:
        bytearray(1 << 29)
    except MemoryError:
        said.append("no memory")
    print(json.dumps([found, said]))
    """
    found, said = json.loads(entered(cell, asked).stdout)
    assert found == [[50, 50], [30, 30], [0, 0]] and said == ["refused", "refused", "no memory"]


@as_root
def test_whatever_a_job_has_sent_away_goes_with_it() -> None:
    with lodged(Policy(), "job-1") as cell:
        asked = """
        import subprocess
        away = subprocess.Popen(["sleep", "1000"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                                stderr=subprocess.DEVNULL, start_new_session=True)
        print(away.pid)
        """
        pid = int(entered(cell, asked).stdout)
        with lodged(Policy(), "job-1") as beside:
            assert beside.user == cell.user
        assert _user_of(pid) == cell.user, "its job is still here"
    eventually(lambda: _user_of(pid) is None)  # it has been killed, and is taken apart


def _user_of(pid: int) -> int | None:
    """None for one that has ended, whether or not anybody has reaped it."""
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else int(process.uids().real)
    except psutil.NoSuchProcess:
        return None


def test_text_that_only_some_may_read_is_given_to_nobody_else(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play\n")
    text.chmod(0o644)
    data = DataSpec(files=(str(text),))
    assert len(sources.load(data, for_everybody=True)) == 21, "whatever the folders above it say"
    text.chmod(0o600)
    with pytest.raises(Refused, match=r"which only some users may read, and jobs run as another; chmod a\+r it"):
        sources.load(data, for_everybody=True)
    assert len(sources.load(data)) == 21
