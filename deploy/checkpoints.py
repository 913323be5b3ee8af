"""What is done with checkpoints on a disk, in a process of its own: verify, diff, export, gc, show.

For programs to read: one JSON object a line on stdout, {"done": ..., "total": ...} in bytes while it works, then
{"result": ...}, or {"refused": "..."} and exit status 1. It needs neither a server nor a store.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from orchestrator.adapters import manifest
from orchestrator.adapters.folder import candidates
from orchestrator.adapters.manifest import CheckpointCorrupt
from orchestrator.adapters.places import place
from orchestrator.adapters.starting_point import Found, committed, find, folder_of
from orchestrator.domain import codec
from orchestrator.domain.errors import EverstepError, Refused

EVERY_S = 0.1
"""Between two words on how far it is."""
Say = Callable[[Mapping[str, Any]], None]


def main() -> int:
    asked = _parser().parse_args()
    try:
        result = asked.do(asked)
    except (EverstepError, OSError) as error:
        say({"refused": str(error)})
        return 1
    except KeyboardInterrupt:
        return 130
    say({"result": result})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="deploy.checkpoints", description=__doc__)
    actions = parser.add_subparsers(required=True)

    def action(name: str, do: Callable[[argparse.Namespace], dict[str, Any]], *paths: str) -> argparse.ArgumentParser:
        made = actions.add_parser(name)
        made.set_defaults(do=do)
        for path in paths:
            made.add_argument(path, type=Path if path == "out" else place)
        return made

    verifying = action("verify", _verify, "path")
    verifying.add_argument("--step", type=int)
    verifying.add_argument("--all", action="store_true")
    showing = action("show", _show, "path")
    showing.add_argument("--step", type=int)
    showing.add_argument("--checked", action="store_true")
    action("diff", _diff, "a", "b")
    exporting = action("export", _export, "path", "out")
    exporting.add_argument("--step", type=int)
    exporting.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    exporting.add_argument("--file-bytes", type=int, default=1 << 30)
    collecting = action("gc", _gc, "path")
    collecting.add_argument("--keep-last", type=int, default=2)
    collecting.add_argument("--remove", action="store_true")
    return parser


def say(line: Mapping[str, Any]) -> None:
    print(json.dumps(line), flush=True)


class Paced:
    """Tells how far it is, not too often, and always that it has begun and ended."""

    def __init__(self) -> None:
        self._due = 0.0

    def __call__(self, done: int, total: int) -> None:
        now = time.monotonic()
        if now >= self._due or done == total:
            self._due = now + EVERY_S
            say({"done": done, "total": total})


# --- one checkpoint ------------------------------------------------------------------------------------------------------


def _verify(asked: argparse.Namespace) -> dict[str, Any]:
    """Of a folder the newest that can be used, and what is damaged of newer ones; or all there are."""
    from worker.checkpoint.verify import verify

    which = find(asked.path, asked.step)
    others = []
    for path in _beside(asked, which):
        try:
            bad = verify(path, Paced()).bad
        except CheckpointCorrupt as error:
            bad = (str(error),)
        if (path / manifest.MANIFEST).exists():  # else it has been removed meanwhile
            others.append({"path": str(path), "bad": list(bad)})
    found = verify(which.path, Paced())
    return {
        "others": others,
        "path": str(found.path),
        "step": found.step,
        "generation": found.generation,
        "program_hash": found.program_hash,
        "lines": found.num_lines,
        "bytes": found.num_bytes,
        "pieces": found.num_pieces,
        "stored_bytes": found.num_stored,
        "seconds": found.seconds,
        "bad": list(found.bad),
    }


def _beside(asked: argparse.Namespace, which: Found) -> list[Path]:
    """Newest first. Where one was named it is alone."""
    if asked.step is not None or which.path == asked.path.expanduser().absolute():
        return []
    there = [path for *_, path in candidates(which.path.parent) if (path / manifest.MANIFEST).exists()]
    return [path for path in there if path != which.path] if asked.all else there[: there.index(which.path)]


def _diff(asked: argparse.Namespace) -> dict[str, Any]:
    from worker.checkpoint.examine import diff

    found = diff(find(asked.a).path, find(asked.b).path, Paced())
    return {
        "a": str(found.a),
        "b": str(found.b),
        "steps": list(found.steps),
        "same_lines": found.num_same,
        "shared_bytes": found.num_shared,
        "new_bytes": found.num_new,
        "only_a": list(found.only_a),
        "only_b": list(found.only_b),
        "unlike": [
            {
                "line": one.line,
                "kind": one.kind,
                "unlike": one.num_unlike,
                "elements": one.num_elements,
                "largest": one.largest,
            }
            for one in found.unlike
        ],
    }


def _export(asked: argparse.Namespace) -> dict[str, Any]:
    from worker.checkpoint.export import export

    found = find(asked.path, asked.step)
    made = export(found, found.kept.spec, asked.out, dtype=asked.dtype, file_bytes=asked.file_bytes, progress=Paced())
    return {
        "path": str(made.path),
        "from": str(found.path),
        "step": found.manifest.step,
        "dtype": asked.dtype,
        "files": made.num_files,
        "tensors": made.num_tensors,
        "bytes": made.num_bytes,
    }


def _show(asked: argparse.Namespace) -> dict[str, Any]:
    """What a checkpoint is of: enough to go on with it as another job. Checked: the newest that is good in every byte."""
    passed_over: list[str] = []
    found = _newest_good(asked, passed_over) if asked.checked else find(asked.path, asked.step)
    kept = found.kept
    if asked.checked:
        from worker.data import sources

        sources.require_same(sources.load(kept.spec.data), kept.profile.text_sha256)
    return {
        "path": str(found.path),
        "step": found.manifest.step,
        "generation": found.manifest.generation,
        "job": kept.job,
        "spec": codec.encode(kept.spec),
        "passed_over": passed_over,
    }


def _newest_good(asked: argparse.Namespace, passed_over: list[str]) -> Found:
    """Raises Refused where none is."""
    from worker.checkpoint.verify import verify

    first = find(asked.path, asked.step)
    # One that was named is the only one that will do.
    is_named = asked.step is not None or first.path == asked.path.expanduser().absolute()
    for found in [first] if is_named else committed(first.path.parent):
        try:
            bad = verify(found.path, Paced()).bad
        except CheckpointCorrupt as error:
            bad = (str(error),)
        if not bad:
            return found
        passed_over.append(bad[0])
    raise Refused(
        f"no checkpoint in {first.path.parent} is good in every byte: {'; '.join(passed_over)}; bring a copy of one"
    )


# --- all of a job --------------------------------------------------------------------------------------------------------


def _gc(asked: argparse.Namespace) -> dict[str, Any]:
    """What nobody needs any more; removed only where that is asked for."""
    folder = folder_of(asked.path)
    found = manifest.going(folder, asked.keep_last)
    whys = {
        **dict.fromkeys(found.older, f"older than the {len(found.kept)} that are kept"),
        **dict.fromkeys(found.unfinished, "unfinished, and older than the newest"),
        **dict.fromkeys(found.packs, "no checkpoint that stays is read from it"),
    }
    going = [{"path": str(path), "bytes": _size(path), "why": why} for path, why in whys.items()]
    if asked.remove:
        manifest.prune(folder, asked.keep_last)
    return {
        "folder": str(folder),
        "kept": [str(path) for path in found.kept or [one.path for one in committed(folder)]],
        "going": [one for one in going if not asked.remove or not place(str(one["path"])).exists()],
        "removed": asked.remove and bool(found.kept),
        "bytes": sum(int(str(one["bytes"])) for one in going),
    }


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


if __name__ == "__main__":
    sys.exit(main())
