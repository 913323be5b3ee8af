"""Bringing the trouble of a scenario into a world, and taking it away again for the second, quiet phase."""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from orchestrator.domain.ids import JobId, NodeId, Step
from orchestrator.domain.job import JobRecord
from orchestrator.domain.layout import partners
from orchestrator.domain.state import Running

from .arena import Arena
from .host import SimHost
from .memory import Flip
from .people import People
from .rank import SimRank
from .scenario import Scripted, Trouble, profile
from .world import World

IN_UPDATE = 0.3
"""How often a bit flips while an update is made, so that its own rank takes what comes of it for right."""

NEEDED = (Trouble.CRASH_SUPERVISOR, Trouble.CRASH_AFTER_COMMIT, Trouble.PAUSE_SUPERVISOR)
"""Not while the supervisor is the only one who knows what the store has forgotten."""

HIDING = (
    *(Trouble.FREEZE_HOST, Trouble.FREEZE_NODE, Trouble.CUT_HOST, Trouble.CUT_ALL, Trouble.UNPLUG, Trouble.FAIL_SWITCH),
    Trouble.INJECT,
)
"""Not while a supervisor is to begin that has nobody but the hosts to tell it what the store has forgotten."""

LOOK_S = 0.05
"""How often a script looks how far its job is."""

UNPLUGGED_S = (0.5, 1.0, 10.0, 60.0)


class Troublemaker:
    """Acts until the scenario's time is up."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._rng = world.rng
        self._nodes = tuple(world.size)
        self._people = People(world)
        self._has_raised = False
        self._hung: set[tuple[JobId, Step]] = set()
        self._brought = 0
        self._forged: set[JobId] = set()
        self.may_roll_back = not world.scenario.gentle or bool(world.scenario.broken)
        if world.scenario.script:
            self._follow()
        else:
            self._again()

    def _again(self) -> None:
        self._world.clock.after(self._rng.expovariate(1 / self._world.scenario.between_s), self._act)

    def _follow(self) -> None:
        """The next of the script, once the job trains and has come that far; then it is left to end."""
        world, script = self._world, self._world.scenario.script
        if world.is_over:
            return
        record = next(iter(world.records().values()), None)
        if self._brought == len(script) or world.clock.now > world.scenario.trouble_until_s:
            self._heal()
            return
        one = script[self._brought]
        if record is not None and isinstance(record.state, Running) and record.committed >= one.step:
            self._brought += 1
            self._bring_to(one)
        world.clock.after(LOOK_S, self._follow)

    def _bring_to(self, one: Scripted) -> None:
        """On those that it hit, where they are alive here; on somebody else's place where they are not."""
        world = self._world
        ranks = {str(device): rank for host in world.living() for device, rank in host.ranks.items() if rank.alive}
        hit = [ranks[device] for device in one.devices if device in ranks]
        node = one.devices[0].rpartition("/")[0] if one.devices else ""
        match one.trouble:
            case Trouble.KILL_NODE if node in world.size and node not in world.dead:
                world.kill_node(NodeId(node))
            case Trouble.KILL_RANK if hit:
                world.note(f"* {one.trouble}: {hit[0].host.job} on {hit[0].device}")
                hit[0].host.kill(hit[0])
            case Trouble.HANG_RANK if hit:
                world.note(f"* {one.trouble}: {hit[0].host.job} on {hit[0].device}")
                self._hang(hit[0])
            case Trouble.FLIP_BIT if hit:
                world.note(f"* {one.trouble}: {hit[0].host.job} on {hit[0].device}")
                self._flip_bit(hit[0])
            case _:
                self._bring(one.trouble)

    def _act(self) -> None:
        world = self._world
        if world.is_over:
            return
        if world.clock.now > world.scenario.trouble_until_s:
            self._heal()
        elif world.scenario.gentle:
            self._act_gently()
            if self._brought != world.scenario.failures:
                self._again()
        else:
            self._bring(self._rng.choice(world.scenario.troubles))
            self._again()

    def _bring(self, trouble: Trouble) -> None:
        world, rng = self._world, self._rng
        hosts = world.living()
        if world.store.is_behind and trouble in NEEDED:
            return
        if world.is_unseen and trouble in HIDING:
            return
        match trouble:
            case Trouble.KILL_RANK:
                self._to_a_rank(trouble, lambda rank: rank.host.kill(rank))
            case Trouble.RAISE:
                # Twice in one step would end the job, and the record may not say yet that it has raised.
                if not self._has_raised and not world.has_failed:
                    self._has_raised = True
                    self._to_a_rank(trouble, lambda rank: rank.host.kill(rank, "OddError: odd"))
            case Trouble.KILL_VOTER:
                for arena in self._running_arenas():
                    arena.kills_voter = True
            case Trouble.KILL_DONOR:
                world.doomed_donors.update(world.records())
            case Trouble.KILL_NODE:
                alive = [node for node in world.size if node not in world.dead]
                if world.scenario.failures == 1:  # the only one must be one for the job
                    alive = [node for node in alive if any(host.node == node and host.ranks for host in hosts)]
                if len(alive) > 1:
                    world.kill_node(rng.choice(alive))
            case Trouble.KILL_HOST:
                self._to_a_host(trouble, hosts, lambda host: host.end(rng.choice((0.02, 1.0))))
            case Trouble.FAIL_HOST:
                known = world.records()
                trained = [host for host in hosts if host.job in known and known[host.job].started_at is not None]
                self._to_a_host(trouble, trained, lambda host: host.fail())
            case Trouble.FREEZE_RANK:
                self._to_a_rank(trouble, self._freeze_rank)
            case Trouble.FREEZE_HOST:
                self._to_a_host(trouble, hosts, self._freeze_host)
            case Trouble.FREEZE_NODE:
                self._to_a_host(trouble, hosts, self._freeze_node)
            case Trouble.HANG_RANK:
                self._to_a_rank(trouble, self._hang)
            case Trouble.CUT_LINK:
                self._cut_a_link()
            case Trouble.FALSE_ALARM:
                self._to_a_host(trouble, hosts, lambda host: host.lookout.cry())
            case Trouble.CUT_HOST:
                self._to_a_host(trouble, hosts, lambda host: self._cut(host, rng.choice((0.5, 5.0, 25.0, 100.0))))
            case Trouble.UNPLUG:
                self._to_a_host(trouble, hosts, lambda host: self._unplug(host.node, rng.choice(UNPLUGGED_S)))
            case Trouble.CUT_ALL:
                seconds = rng.choice((1.0, 5.0, 20.0))
                world.note(f"* no host can be reached for {seconds} s")
                for host in hosts:
                    self._cut(host, seconds)
            case Trouble.CRASH_SUPERVISOR:
                if not world.supervisor.is_dead:
                    world.note("* the supervisor crashes")
                    world.supervisor.crash()
                    world.restart_supervisor(rng.choice((0.1, 6.0)))
            case Trouble.CRASH_AFTER_COMMIT:
                if not world.supervisor.is_dead and not world.supervisor.dies_after_commit:
                    world.supervisor.dies_after_commit = True
                    world.restart_supervisor(rng.uniform(3.0, 8.0))
            case Trouble.PAUSE_SUPERVISOR:
                if not world.supervisor.is_dead:
                    seconds = rng.choice((1.0, 10.0))
                    world.note(f"* the supervisor sleeps for {seconds} s")
                    world.supervisor.sleep(seconds)
                    if rng.random() < 0.5:
                        world.restart_supervisor(seconds / 2)
            case Trouble.STALL_STORE:
                world.store_stalled_until = world.clock.now + rng.choice((0.2, 3.0))
                world.note("* the store stalls")
            case Trouble.REWIND_STORE:
                world.rewind_store()
            case Trouble.REWIND_UNSEEN:
                world.rewind_unseen()
            case Trouble.FAIL_STORE:
                world.store_fails_until = world.clock.now + rng.choice((0.5, 2.0, 8.0))
                world.note("* commits fail")
            case Trouble.CUT_POWER:
                self._to_a_rack(trouble, world.kill_node)
            case Trouble.FAIL_SWITCH:
                seconds = rng.choice(UNPLUGGED_S)
                self._to_a_rack(trouble, lambda node: self._unplug(node, seconds))
            case Trouble.FLIP_BIT:
                self._to_a_rank(trouble, self._flip_bit)
            case Trouble.DAMAGE_CHECKPOINT | Trouble.FORGE_CHECKPOINT:
                for job, record in sorted(world.records().items()):
                    self._spoil_checkpoint(trouble, job, record)
            case Trouble.SPOIL_GRADIENT:
                for arena in self._running_arenas():
                    arena.is_spoiled = True
            case Trouble.NOT_FINITE:
                for arena in self._running_arenas():
                    arena.is_not_finite = True
            case Trouble.INJECT:
                self._people.inject()
            case Trouble.ADD_NODE:
                self._add_node()
            case Trouble.RESIZE:
                self._people.resize()
            case Trouble.CORDON:
                self._people.cordon()
            case Trouble.PAUSE:
                self._people.pause()
            case Trouble.PRIORITY:
                self._people.prioritize()
            case Trouble.SLOW:
                self._to_a_rank(trouble, self._slow)
            case Trouble.SPOIL_NODE:
                self._spoil_node()
            case Trouble.CANCEL:
                if rng.random() < 0.1 and world.records():
                    world.note("* a user cancels")
                    world.cancel(rng.choice(sorted(world.records())))
            case _:
                assert_never(trouble)

    def _act_gently(self) -> None:
        """One failure, and only where the job has committed a step since the last: mirrors are whole again."""
        world = self._world
        if world.scenario.troubles == (Trouble.INJECT,):
            self._people.inject()
            return
        if not world.records() or world.unplugged:
            return
        for job, record in sorted(world.records().items()):
            state = record.state
            arena = world.arenas.get((job, record.generation))
            if (
                not isinstance(state, Running)
                or arena is None
                or record.committed <= arena.step
                or arena.is_broken
                or arena.kills_voter
                or any(rank.hung for rank in arena.here.values())
            ):
                return
            if (
                any(owner.node == mirror.node for owner, mirror in partners(state.plan).items())
                or state.plan.world_size == 1
            ):
                self.may_roll_back = True
        self._brought += 1
        self._bring(self._rng.choice(world.scenario.troubles))

    def _heal(self) -> None:
        world = self._world
        world.note("* trouble ends")
        world.unfit.clear()
        self._people.make_peace()
        for devices in (world.size[node] for node in sorted(set(self._nodes) & set(world.dead))):
            world.add_node(devices)
        if world.supervisor.is_dead or world.supervisor.dies_after_commit:
            world.supervisor.crash()
            world.restart_supervisor(1.0)

    # --- details ----------------------------------------------------------------------------------------------------------

    def _add_node(self) -> None:
        world, rng = self._world, self._rng
        noticed = [node for node, at in world.dead.items() if at + 1.0 < world.clock.now]
        if noticed and rng.random() < 0.5:
            node = rng.choice(noticed)
            world.add_node(world.size[node], node)
        else:
            world.add_node(rng.choice((1, 2, 4)))

    def _spoil_node(self) -> None:
        """It trains as if nothing were: only a check shows that, of a newcomer or after a fault."""
        world, rng = self._world, self._rng
        if rng.random() < 0.5:
            world.add_node(rng.choice((1, 2, 4)))
            node = list(world.size)[-1]
        else:
            node = rng.choice(sorted(world.size))
        world.unfit.add(node)
        world.note(f"* {node} is not fit to be used")

    def _running_arenas(self) -> list[Arena]:
        world = self._world
        running = [(job, record.generation) for job, record in sorted(world.records().items())]
        return [world.arenas[key] for key in running if key in world.arenas]

    def _spoil_checkpoint(self, trouble: Trouble, job: JobId, record: JobRecord) -> None:
        """A forged one can only be told by the step after it, and two in a row end the job.

        So none is forged that others go on from, nor where the seed is no way back should the other one be damaged.
        """
        newest, world = record.checkpoint, self._world
        if newest is None or not newest.at or newest.path in world.forged or record.canary is not None:
            return
        if trouble is Trouble.DAMAGE_CHECKPOINT:
            world.damaged.add(newest.path)
        elif newest.after and job not in {*self._forged, *world.scenario.starts} and not _has_journal(record):
            self._forged.add(job)
            line = profile().lines[0]
            world.forged[newest.path] = Flip(line.name, self._rng.randrange(line.numel), world.next_flip())
        world.note(f"* {trouble} of {job}: {newest.path}")

    def _flip_bit(self, rank: SimRank) -> None:
        if rank.memory is not None and rank.memory.intervals:
            interval = self._rng.choice(rank.memory.intervals)
            flip = Flip(interval.line, self._rng.randrange(interval.start, interval.stop), self._world.next_flip())
            rank.memory.wrong |= {flip}
            if self._rng.random() < IN_UPDATE and rank.arena is not None:
                rank.arena.updated_wrongly(rank)

    def _to_a_host(self, trouble: Trouble, hosts: list[SimHost], do: object) -> None:
        assert callable(do)
        if hosts:
            host = self._rng.choice(hosts)
            self._world.note(f"* {trouble}: {host.job} on {host.node}")
            do(host)

    def _to_a_rack(self, trouble: Trouble, do: Callable[[NodeId], None]) -> None:
        world = self._world
        racks: dict[str, list[NodeId]] = {}
        for node in world.nodes():
            if node.id not in world.dead and node.labels:
                racks.setdefault(node.labels["rack"], []).append(node.id)
        if racks:
            rack = self._rng.choice(sorted(racks))
            world.note(f"* {trouble}: {rack}")
            for name in racks[rack]:
                do(name)

    def _to_a_rank(self, trouble: Trouble, do: object) -> None:
        assert callable(do)
        ranks = [rank for host in self._world.living() for _, rank in sorted(host.ranks.items()) if rank.alive]
        if ranks:
            rank = self._rng.choice(ranks)
            self._world.note(f"* {trouble}: {rank.host.job} on {rank.device} (pid {rank.pid})")
            do(rank)

    def _slow(self, rank: SimRank) -> None:
        world, device = self._world, rank.device

        def mend() -> None:
            world.slow.pop(device, None)

        if device not in world.slow:
            world.slow[device] = self._rng.choice((2.0, 3.0))
            world.clock.after(self._rng.choice((2.0, 8.0, 20.0)), mend)

    def _freeze_rank(self, rank: SimRank) -> None:
        rank.frozen = True
        self._world.clock.after(self._rng.choice((0.1, 1.0, 5.0)), rank.thaw)

    def _freeze_host(self, host: SimHost) -> None:
        host.frozen = True
        self._world.clock.after(self._rng.choice((0.1, 1.0, 5.0, 20.0)), host.thaw)

    def _freeze_node(self, host: SimHost) -> None:
        host.frozen = True
        seconds = self._rng.choice((0.1, 1.0, 5.0, 20.0))
        self._world.clock.after(seconds, host.thaw)
        for _, rank in sorted(host.ranks.items()):
            rank.frozen = True
            self._world.clock.after(seconds, rank.thaw)

    def _hang(self, rank: SimRank) -> None:
        """Once per step: a step that hangs again and again is a program's own fault, and ends the job."""
        if rank.arena is None or rank.finished or rank.memory is None:
            return
        job, step = rank.host.job, rank.memory.step
        # Ranks are never more than a step apart.
        if not any((job, Step(step + apart)) in self._hung for apart in range(-2, 3)):
            self._hung.add((job, step))
            rank.hung = True

    def _cut_a_link(self) -> None:
        world, rng = self._world, self._rng
        arenas = [world.arenas.get((job, record.generation)) for job, record in sorted(world.records().items())]
        members = [arena.members for arena in arenas if arena is not None and len(arena.members) > 1]
        if members:
            a, b = sorted(rng.sample(rng.choice(members), 2))
            seconds = rng.choice((0.5, 3.0, 20.0))
            world.note(f"* nothing passes between {a} and {b} for {seconds} s")
            world.cut_links.add((a, b))
            world.clock.after(seconds, lambda: world.cut_links.discard((a, b)))

    def _unplug(self, node: NodeId, seconds: float) -> None:
        world = self._world
        world.unplugged.add(node)
        world.clock.after(seconds, lambda: world.unplugged.discard(node))

    def _cut(self, host: SimHost, seconds: float) -> None:
        host.cut = True

        def mend() -> None:
            host.cut = False

        self._world.clock.after(seconds, mend)


def _has_journal(record: JobRecord) -> bool:
    return record.spec.checkpoint.policy != "full"
