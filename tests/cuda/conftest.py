"""Where there is no CUDA device all of this is skipped, and the end of the test run says so.

Nothing here may use CUDA in a process that ranks are forked from: they come from a fork server or a zygote of their own.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
_skipped: list[str] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
            _skipped.append(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _skipped:
        terminalreporter.write_line(f"{len(_skipped)} CUDA TESTS WERE SKIPPED: no CUDA device", yellow=True, bold=True)


@pytest.fixture(scope="session")
def cuda() -> torch.device:
    return torch.device("cuda", 0)
