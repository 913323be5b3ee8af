"""`everstep secret`: put, list and remove the values that job files name, on the machine that has the state directory.

A value is read from standard input or asked for, never taken as an argument: arguments are seen by everybody. It goes into
a file of its own and through no API, so that Redis, records, audit and backups of any of them never have it.
"""

from __future__ import annotations

import argparse
import getpass
import json
import re
import sys
from pathlib import Path

from orchestrator.adapters.scrubbing import logs_under, scrub
from orchestrator.adapters.secret_folder import FOLDER, SecretFolder
from orchestrator.domain.errors import NotFound, Refused
from orchestrator.domain.queue import DEFAULT_PROJECT

FAILED, USAGE, NOT_FOUND = 1, 2, 102
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def main(arguments: list[str] | None = None) -> int:
    asked = _parser().parse_args(arguments)
    folder = SecretFolder(Path(asked.state_dir).expanduser().resolve() / FOLDER)
    try:
        match asked.action:
            case "set":
                value = getpass.getpass(f"value of {asked.name}: ") if sys.stdin.isatty() else sys.stdin.read()
                before = folder.put(asked.project, asked.name, value.removesuffix("\n"))
                said = f"jobs of project {asked.project} may name {asked.name} under secrets; new processes get it"
                _tell(asked, said, _take_out_of_logs(folder, before))
            case "rm":
                before = folder.remove(asked.project, asked.name)
                said = f"{asked.name} of project {asked.project} is gone; processes that run keep what they were given"
                _tell(asked, said, _take_out_of_logs(folder, before))
            case _:
                _list(folder, asked.json)
    except Refused as error:
        print(error.message, file=sys.stderr)
        return USAGE
    except OSError as error:
        print(f"its value before may still be in logs: {error}", file=sys.stderr)
        return FAILED
    except NotFound as error:
        print(error, file=sys.stderr)
        return NOT_FOUND
    return 0


def _take_out_of_logs(folder: SecretFolder, before: str) -> int:
    """How many logs had it. Whoever reads an old one after this would not know what to cover."""
    return scrub(logs_under(folder.root.parent), before) if before else 0


def _tell(asked: argparse.Namespace, said: str, logs: int) -> None:
    if asked.json:
        print(json.dumps({"project": asked.project, "name": asked.name, "logs_cleaned": logs}))
        return
    print(said)
    if logs:
        print(f"its value before was taken out of {logs} logs")


def _list(folder: SecretFolder, as_json: bool) -> None:
    found = list(folder.names())
    if as_json:
        print(json.dumps([{"project": project, "name": name} for project, name in found]))
    elif not found:
        print("no secrets; put one here with: everstep secret set NAME")
    else:
        print("\n".join(f"{project}  {name}" for project, name in found))


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="everstep secret", description=__doc__)
    made.add_argument("--state-dir", default="~/.everstep", metavar="DIR")
    actions = made.add_subparsers(dest="action", required=True)
    for action, words in (("set", "keep a value, read from standard input"), ("rm", "forget a value")):
        one = actions.add_parser(action, help=words)
        one.add_argument("name", type=_name, metavar="NAME")
        one.add_argument("--project", type=_name, default=DEFAULT_PROJECT, help="whose jobs may name it")
        one.add_argument("--json", action="store_true")
    actions.add_parser("ls", help="names, no values").add_argument("--json", action="store_true")
    return made


def _name(text: str) -> str:
    if NAME.fullmatch(text) is None:
        raise argparse.ArgumentTypeError(f"{text!r} must be 1..63 letters, digits, dots, dashes or underscores")
    return text


if __name__ == "__main__":
    sys.exit(main())
