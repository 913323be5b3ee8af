"""A small cluster's best plan by trying every one, and how far from it the search's is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from orchestrator.domain.kinds import GIB, KINDS, DeviceKind
from orchestrator.planner.ask import Ask, Batch, Planned
from orchestrator.planner.compose import Member
from orchestrator.planner.machines import Machines, NodeGroup, machines
from orchestrator.planner.memory import Rules, usable
from orchestrator.planner.model import Model, Shape, of_shape
from orchestrator.planner.pipelines import Bench, Track
from orchestrator.planner.search import price, search
from orchestrator.planner.shares import Pace, share_ids

TIGHT = DeviceKind(name="tight", memory_bytes=2 * GIB, bf16_tflops=40, memory_gb_s=400, link_gb_s=20, network_gb_s=5)
"""A kind on which memory decides."""
Nodes = tuple[DeviceKind, int, int]
"""(kind, nodes, devices of each)."""
CASES: tuple[tuple[tuple[Nodes, ...], int, int, int], ...] = (
    (((KINDS["A100"], 12, 1),), 4, 24, 0),
    (((KINDS["A100"], 2, 1), (KINDS["H100"], 2, 1)), 5, 12, 0),
    (((KINDS["A100"], 1, 2), (KINDS["H100"], 1, 2), (KINDS["V100"], 1, 2)), 4, 9, 0),
    (((KINDS["A100"], 2, 1), (KINDS["B200"], 1, 2)), 6, 7, 0),
    (((KINDS["V100"], 2, 2), (KINDS["H100"], 1, 1)), 3, 16, 1),
    (((TIGHT, 4, 1), (KINDS["A100"], 1, 1)), 6, 8, 1),
    (((TIGHT, 6, 1),), 6, 12, 1),
)
"""(nodes, blocks, micro-batches, mirrors): at most 12 devices, 8 layers and 3 kinds."""


def worst_gap() -> float:
    """Over CASES: how much slower the search's plan is than the best there is, as a share."""
    gaps = []
    for nodes, blocks, ids, mirrors in CASES:
        ask = an_ask(a_model(blocks), a_cluster(*nodes), ids, rules=Rules(mirrors=mirrors))
        found = search(ask)
        assert isinstance(found, Planned), found
        gaps.append(found.best.seconds / fastest_of_all(ask) - 1)
    return max(gaps)


def a_model(blocks: int = 6, hidden: int = 1024, *, sequence: int = 512) -> Model:
    """Embedding and head come on top of the blocks."""
    return of_shape(Shape(layers=blocks, hidden=hidden, heads=8, sequence=sequence, vocabulary=8192, tied=False))


def a_cluster(*nodes: Nodes) -> Machines:
    return machines([NodeGroup(kind=kind, nodes=number, devices=devices) for kind, number, devices in nodes])


def an_ask(model: Model, cluster: Machines, micro_batches: int, *, rules: Rules) -> Ask:
    return Ask(model=model, machines=cluster, batches=(Batch(samples=1, micro_batches=micro_batches),), rules=rules)


def all_splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    for cuts in combinations(range(1, layers), stages - 1):
        yield (0, *cuts, layers)


def fastest_of_all(ask: Ask) -> float:
    """Seconds of the best plan there is: every order of classes, every split, every set of pipelines, every sharing
    of ids.
    """
    best = float("inf")
    batch = ask.batches[0]
    for tp in ask.model.degrees(max(one.devices for one in ask.machines.classes)):
        if ask.tp is not None and tp != ask.tp:
            continue
        classes = tuple(one for one in ask.machines.classes if one.devices >= tp)
        bench = Bench(
            model=ask.model,
            classes=classes,
            tp=tp,
            samples=batch.samples,
            recompute=False,
            rules=ask.rules,
            constants=ask.constants,
            measured=ask.measured,
        )
        groups = tuple(one.groups(tp) for one in classes)
        best = min(best, _best_of(bench, groups, batch.micro_batches))
    return best


def _best_of(bench: Bench, groups: tuple[int, ...], ids: int) -> float:
    best = float("inf")
    options: dict[tuple[int, ...], list[Track]] = {}
    for sets in _sets(groups, ids):
        replicas = len(sets)
        choices = []
        for counts in sets:
            if (*counts, replicas) not in options:
                options[(*counts, replicas)] = _pareto(bench, counts, replicas)
            choices.append(options[(*counts, replicas)])
        for tracks in _products(sets, choices):
            best = min(best, _seconds(bench, tracks, ids))
    return best


def _seconds(bench: Bench, tracks: Sequence[Track], ids: int) -> float:
    network = min(bench.classes[index].kind.network_gb_s for track in tracks for index in track.classes)
    after = {track: sum(bench.after(track, len(tracks), network)) for track in tracks}
    paces = [Pace(track.fill + after[track], track.period, track.depth) for track in tracks]
    shared = share_ids(paces, ids)
    if shared is None:
        return float("inf")
    return price(bench, tuple(Member(track=t, ids=mine) for t, mine in zip(tracks, shared, strict=True))).total


def _pareto(bench: Bench, counts: tuple[int, ...], replicas: int) -> list[Track]:
    """Every order and split that fits memory and is not worse than another in everything."""
    found: dict[tuple[float, float], Track] = {}
    for order in _orders(counts):
        for bounds in all_splits(len(bench.model.layers), len(order)):
            track = bench.cut(order, bounds)
            if any(
                bench.bytes_of(track, stage, len(order), replicas) > usable(bench.classes[index].kind)
                for stage, index in enumerate(order)
            ):
                continue
            found.setdefault((track.period, track.fill + sum(bench.after(track, replicas, 12.5))), track)
    kept: list[Track] = []
    least = float("inf")
    for (_, rest), track in sorted(found.items(), key=lambda one: one[0]):
        if rest < least - 1e-15:
            least = rest
            kept.append(track)
    return kept


def _orders(counts: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every different order of so many stages of each class."""
    if not any(counts):
        yield ()
    for index, number in enumerate(counts):
        if number:
            rest = (*counts[:index], number - 1, *counts[index + 1 :])
            yield from ((index, *order) for order in _orders(rest))


def _sets(groups: tuple[int, ...], most: int) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Every multiset of pipelines, by classes' counts, that these groups make; groups may stay idle."""

    def vectors(limit: Sequence[int]) -> Iterator[tuple[int, ...]]:
        if not limit:
            yield ()
            return
        for number in range(limit[0] + 1):
            for rest in vectors(limit[1:]):
                yield (number, *rest)

    def choose(left: tuple[int, ...], above: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], ...]]:
        yield ()
        for vector in vectors(left):
            if vector < above or not any(vector) or sum(vector) > most:
                continue
            rest = tuple(a - b for a, b in zip(left, vector, strict=True))
            for others in choose(rest, vector):
                yield (vector, *others)

    return (found for found in choose(groups, tuple(0 for _ in groups)) if found)


def _products(sets: Sequence[tuple[int, ...]], choices: Sequence[list[Track]]) -> Iterator[tuple[Track, ...]]:
    """One of each's options; pipelines of the same classes take theirs in order."""
    if not choices:
        yield ()
        return
    for track in choices[0]:
        for rest in _products(sets[1:], choices[1:]):
            yield (track, *rest)
