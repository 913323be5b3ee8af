"""Jobs of these tests run as a user of their own where root may arrange that; else as root, and the run says so."""

from __future__ import annotations

import os

import pytest

from worker.confinement import may_show_views
from worker.lodging import VARIABLES

_IS_KEPT_FROM_IT = os.geteuid() == 0 and not may_show_views()
if _IS_KEPT_FROM_IT:
    os.environ[f"{VARIABLES}USER"] = "service"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _IS_KEPT_FROM_IT:
        words = "JOBS RAN AS ROOT: it has no right to mount here, and jobs need what lies in closed folders"
        terminalreporter.write_line(words, yellow=True, bold=True)
