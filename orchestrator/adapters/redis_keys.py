"""Every key this project has in Redis, and nothing else: what each holds, for Python and for the scripts.

term, lease             the newest supervisor's term; its name, gone when it stops renewing
commits, applied        how many commits there ever were; "term:sequence" of the newest
jobs, jobs:made         jobs by order of submission; how many there ever were
jobs:open, jobs:done    taken up by a supervisor and not over; over for good
jobs:ended, :archived   of those over, by when they ended: whole ones, and those of which the record alone is left
nodes, cursor           the cluster as readers see it; the last command taken into account
quarantine, cordons     what is held against devices; nodes that nothing new is placed on
admissions              nodes that are being checked, are fit to be used, or are not
projects, queue         quotas; who waits and why, as readers see it
commands                stream: what users ask
job:<id>                the record
job:<id>:history|steps  streams with ids 1-0, 2-0, ... of one count over both, so that one id places a reader in both
job:<id>:ids            hash: the newest id (last), of each stream (history, steps), the submission's hash (body); how often
                        what is decided on has changed (revision), what that was (mark), the newest command about it (asked)
tokens, tokens:by       hashes: id -> token; digest of its text -> id
tokens:used             hash: id -> when it was used last
session|code:<digest>   id of the token that a browser's session or a login link stands for
audit                   stream: who asked for what, and what came of it
hooks, hooks:standing   hashes: id -> webhook; id -> how it fares
hooks:lease             who sends, gone when it stops renewing
hooks:made, hooks:read  submissions known to webhooks; hash: job -> the newest entry of its history that was looked at
hooks:nodes             nodes as webhooks were told of them
hooks:messages          how many there ever were: what orders them
hooks:due               "hook/delivery" by when it is to be sent
hook:<id>:deliveries    hash: id -> delivery; :order has the ids by age, :held what waits while the hook is paused
key:<key>               Idempotency-Key -> "job body-hash"
request:<id>            the answer to a write whose answer may have been lost
probe                   written and read back by health checks
"""

from __future__ import annotations

from orchestrator.domain.ids import JobId

PREFIX = "everstep:"

TERM = PREFIX + "term"
LEASE = PREFIX + "lease"
COMMITS = PREFIX + "commits"
APPLIED = PREFIX + "applied"
REIGNS = PREFIX + "reigns"
"""Of the latest supervisors: term, commits and instant at which it began, and its name alone, with a space between."""
JOBS = PREFIX + "jobs"
JOBS_MADE = PREFIX + "jobs:made"
JOBS_OPEN = PREFIX + "jobs:open"
JOBS_DONE = PREFIX + "jobs:done"
JOBS_ENDED = PREFIX + "jobs:ended"
JOBS_ARCHIVED = PREFIX + "jobs:archived"
NODES = PREFIX + "nodes"
CURSOR = PREFIX + "cursor"
QUARANTINE = PREFIX + "quarantine"
CORDONS = PREFIX + "cordons"
ADMISSIONS = PREFIX + "admissions"
PROJECTS = PREFIX + "projects"
QUEUE = PREFIX + "queue"
COMMANDS = PREFIX + "commands"
PROBE = PREFIX + "probe"
TOKENS = PREFIX + "tokens"
TOKENS_BY = PREFIX + "tokens:by"
TOKENS_USED = PREFIX + "tokens:used"
AUDIT = PREFIX + "audit"
HOOKS = PREFIX + "hooks"
HOOKS_STANDING = PREFIX + "hooks:standing"
HOOKS_MADE = PREFIX + "hooks:made"
HOOKS_NODES = PREFIX + "hooks:nodes"
HOOKS_DUE = PREFIX + "hooks:due"

HISTORY, STEPS = "history", "steps"
ENTRY, PREVIOUS = "e", "p"
"""Fields of a stream's entries: the value, and the id before it in the same stream (so a reader sees what was trimmed)."""


def job(id: JobId) -> str:
    return f"{PREFIX}job:{id}"


def access_pass(kind: str, digest: str) -> str:
    return f"{PREFIX}{kind}:{digest}"


def passes_of(kind: str, holder: str) -> str:
    return f"{PREFIX}{kind}s-of:{holder}"


def deliveries(hook: str) -> str:
    return f"{PREFIX}hook:{hook}:deliveries"


def deliveries_order(hook: str) -> str:
    return f"{PREFIX}hook:{hook}:order"


def ids(id: JobId) -> str:
    return f"{job(id)}:ids"


def stream(id: JobId, kind: str) -> str:
    return f"{job(id)}:{kind}"


LUA = f"""
local PREFIX = '{PREFIX}'
local TERM, LEASE, COMMITS, APPLIED = PREFIX..'term', PREFIX..'lease', PREFIX..'commits', PREFIX..'applied'
local REIGNS = PREFIX..'reigns'
local JOBS, JOBS_MADE, JOBS_OPEN, JOBS_DONE = PREFIX..'jobs', PREFIX..'jobs:made', PREFIX..'jobs:open', PREFIX..'jobs:done'
local NODES, CURSOR, COMMANDS = PREFIX..'nodes', PREFIX..'cursor', PREFIX..'commands'
local QUARANTINE, CORDONS, ADMISSIONS = PREFIX..'quarantine', PREFIX..'cordons', PREFIX..'admissions'
local JOBS_ENDED, JOBS_ARCHIVED = PREFIX..'jobs:ended', PREFIX..'jobs:archived'
local PROJECTS, QUEUE = PREFIX..'projects', PREFIX..'queue'
local function job_key(id) return PREFIX..'job:'..id end
local function ids_key(id) return job_key(id)..':ids' end
local function stream_key(id, kind) return job_key(id)..':'..kind end
local function idempotency_key(key) return PREFIX..'key:'..key end
local function request_key(id) return PREFIX..'request:'..id end
"""
"""The same names for scripts."""
