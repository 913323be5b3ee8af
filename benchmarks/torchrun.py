"""torchrun as a peer: one command that starts worker processes and, where it is told to, starts them all again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .peer import Peer, free_port


class Torchrun(Peer):
    """module: a script of benchmarks.peers, given `arguments` and its log file."""

    def __init__(
        self, module: str, num_workers: int, arguments: Sequence[str], folder: Path, options: Sequence[str] = ()
    ) -> None:
        super().__init__(module, folder)
        self._num_workers = num_workers
        self._arguments = tuple(arguments)
        self._options = tuple(options)

    def commands(self) -> Sequence[Sequence[str]]:
        return [torchrun_command(self.name, self._num_workers, [*self._arguments, str(self.log)], self._options)]


def torchrun_command(module: str, num_workers: int, arguments: Sequence[str], options: Sequence[str] = ()) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_workers}"]
    if "--standalone" not in options:
        # The static rendezvous keeps no heartbeats, so it does not mind being stopped for a while.
        command += ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    return [*command, *options, "-m", f"benchmarks.peers.{module}", *arguments]
