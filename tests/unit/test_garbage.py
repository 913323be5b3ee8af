"""A server that has settled walks only what came after, and still frees what refers to itself."""

from __future__ import annotations

import subprocess
import sys
import textwrap


def test_what_a_server_is_made_of_is_not_walked_again_and_later_cycles_are_still_freed() -> None:
    # In a process of its own: this one's collector is not to be changed.
    said = subprocess.run([sys.executable, "-c", textwrap.dedent(_A_SERVER)], capture_output=True, text=True, check=True)
    walked, made, left = map(int, said.stdout.split())
    assert walked < 1_000
    assert 0 < left < made / 2


_A_SERVER = """
    import gc, weakref
    from deploy import garbage

    class Node:
        pass

    def cycle(beside):
        one = Node()
        one.itself, one.beside = one, beside
        return weakref.ref(one)

    start = [Node() for _ in range(50_000)]
    garbage.settle()
    walked = len(gc.get_objects())
    # Each outlives the walk of its generation before it becomes garbage, so that only older generations can free it.
    refs, held = [], []
    for number in range(100_000):
        held.append(Node())
        refs.append(cycle(held[-1]))
        if len(held) > 5_000:
            held.clear()
    print(walked, len(refs), sum(ref() is not None for ref in refs))
"""
