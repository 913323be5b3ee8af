"""Makes api/client/client.py from api/client/aio.py: the same client, where nothing is awaited.

    python -m deploy.sync_client            writes it
    python -m deploy.sync_client --check    exit status 1 where it is not what would be written

Two clients written by hand were two places for each call, and each change of one was to be made in the other.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path

CLIENT = Path(__file__).parents[1] / "api/client"
SOURCE, MADE = CLIENT / "aio.py", CLIENT / "client.py"
HEADER = '''"""The client: every call of the API as a typed method, with retries where a repeat is safe.

Made from aio.py by `python -m deploy.sync_client`: change that one.
"""'''
REPLACED = (
    (r"\A\"\"\".*?\"\"\"", HEADER),
    (r"^import asyncio\n", ""),
    (r"\basync (def|for|with)\b", r"\1"),
    (r"\bawait ", ""),
    (r"\bAsync(?=[A-Z])", ""),
    (r"\b__a(enter|exit)__", r"__\1__"),
    (r"\ba(close|read)\(", r"\1("),
    (r"\basyncio\.sleep\b", "time.sleep"),
    (r"\bbudget\.rest\b", "budget.pause"),
    (r"for (\w+) in (.+):\n +yield \1\n", r"yield from \2\n"),
)


def made() -> str:
    """The text of client.py. Raises CalledProcessError where the formatter refuses it."""
    text = SOURCE.read_text()
    for pattern, by in REPLACED:
        text = re.sub(pattern, by, text, flags=re.DOTALL | re.MULTILINE if pattern.startswith(r"\A") else re.MULTILINE)
    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(MADE), "-"]
    return subprocess.run(command, input=text, stdout=subprocess.PIPE, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        MADE.write_text(made())
    return 0 if MADE.read_text() == made() else 1


if __name__ == "__main__":
    sys.exit(main())
