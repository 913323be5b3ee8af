"""The API over a real port, and who speaks to it: as any HTTP client does, and with the SDK."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from api.client import Client
from tests.served import Served, serve


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serve(tmp_path) as running:
        yield running


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.url, trust_env=False, timeout=60) as client:
        yield client


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url, retry_s=30) as client:
        yield client
