"""What a process that runs a job's code is started with, and without."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from worker import child, private_tmp
from worker.child import of_one_thread

SECRETS = {
    "RAY_AUTH_TOKEN_PATH": "/state/ray/token",
    "FLAGS_redis_password": "canary",
    "EVERSTEP_TOKEN": "canary",
    "EVERSTEP_TOKEN_FILE": "/state/admin.token",
    "EVERSTEP_REDIS__PASSWORD": "canary",
    "EVERSTEP_JOIN_TOKEN": "canary",
}
PROGRAM = """
import json, os, resource, time
core = lambda: resource.getrlimit(resource.RLIMIT_CORE)
for _ in range(1000):  # its parent says so once it has been started
    if core() == (0, 0):
        break
    time.sleep(0.01)
print(json.dumps({"env": dict(os.environ), "core": core(), "leads": os.getsid(0) == os.getpid()}))
"""


def test_no_way_to_ray_redis_or_the_api_is_passed_on() -> None:
    found = of_one_thread(SECRETS | {"EVERSTEP_CLUSTER": "c", "EVERSTEP_NODE": "n", "AWS_REGION": "x"})
    assert not set(found) & set(SECRETS)
    assert found["EVERSTEP_CLUSTER"] == "c" and found["EVERSTEP_NODE"] == "n", "by which it is found when it must go"
    assert found["AWS_REGION"] == "x" and found["OMP_NUM_THREADS"] == "1"


def test_a_started_process_has_a_session_of_its_own_no_secret_and_leaves_no_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tells_of_itself.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    started = child.start("tells_of_itself", b"", tmp_path / "log")
    try:
        assert started.process.wait(30) == 0
    finally:
        started.socket.close()
        os.close(started.pidfd)
    told = json.loads((tmp_path / "log").read_text())
    assert told["core"] == [0, 0] and told["leads"]
    assert not set(told["env"]) & set(SECRETS) and "canary" not in json.dumps(told)


def test_a_job_has_a_tmp_of_its_own_and_what_dead_hosts_left_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    mine = private_tmp.make("job-1", os.getpid())
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700
    gone = subprocess.Popen(["true"])
    gone.wait()
    left = private_tmp.make("job-1", gone.pid)
    (left / "large").write_text("x")
    foreign = tmp_path / left.name.replace(f"-{gone.pid}-", f"0-{gone.pid}-")  # as seen from another container
    foreign.mkdir()
    other = private_tmp.make("job-2", os.getpid())
    assert sorted(tmp_path.iterdir()) == sorted([mine, foreign, other]), "what may be in use stays, whoever's it is"
    private_tmp.remove(mine)
    assert not mine.exists()
