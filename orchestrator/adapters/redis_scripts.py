"""The writes of the store, each one Lua script: checked first, then written whole, and harmless when sent twice.

A write whose answer was lost may be repeated: a commit by its (term, sequence), a submission by its job id and body, a
command by its request id. Scripts read no clock; they use Redis 6.2 and nothing newer.
"""

from __future__ import annotations

from .redis_keys import LUA

_APPEND = """
local function append(id, kind, cap, entry)
  local number = redis.call('HINCRBY', ids_key(id), 'last', 1)
  local previous = redis.call('HGET', ids_key(id), kind) or '0'
  redis.call('XADD', stream_key(id, kind), 'MAXLEN', '~', cap, number..'-0', 'p', previous, 'e', entry)
  redis.call('HSET', ids_key(id), kind, number)
end
local function list_job(id)
  if not redis.call('ZSCORE', JOBS, id) then
    redis.call('ZADD', JOBS, redis.call('INCR', JOBS_MADE), id)
  end
end
"""

ADD_PASS = """
local prefix, by, digest, holder, ttl_s, most = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], tonumber(ARGV[6])
redis.call('SET', prefix..digest, holder, 'EX', ttl_s)
redis.call('LREM', by, 0, digest)
redis.call('RPUSH', by, digest)
redis.call('EXPIRE', by, ttl_s)
if redis.call('LLEN', by) <= most then return 0 end
local alive = {}
for _, one in ipairs(redis.call('LRANGE', by, 0, -1)) do
  if redis.call('EXISTS', prefix..one) == 1 then table.insert(alive, one) end
end
redis.call('DEL', by)
for number, one in ipairs(alive) do
  if number <= #alive - most then redis.call('DEL', prefix..one) else redis.call('RPUSH', by, one) end
end
redis.call('EXPIRE', by, ttl_s)
return #alive
"""
"""What lets somebody in, and the end of the oldest where its holder has too many."""

ACQUIRE = (
    LUA
    + """
local holder, ttl_ms, by, at, kept = ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5])
local held = redis.call('GET', LEASE)
if held and held ~= holder then return 0 end
redis.call('SET', LEASE, holder, 'PX', ttl_ms)
local term = redis.call('INCR', TERM)
redis.call('RPUSH', REIGNS, term..' '..(redis.call('GET', COMMITS) or '0')..' '..at..' '..by)
redis.call('LTRIM', REIGNS, -kept, -1)
return term
"""
)

RENEW = (
    LUA
    + """
local holder, term, ttl_ms = ARGV[1], ARGV[2], ARGV[3]
local held = redis.call('GET', LEASE)
if redis.call('GET', TERM) ~= term or (held and held ~= holder) then return 0 end
redis.call('SET', LEASE, holder, 'PX', ttl_ms)
return 1
"""
)

OVERTAKE = (
    LUA
    + """
local holder, term, above, ttl_ms = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4]
local held = redis.call('GET', LEASE)
local newest = tonumber(redis.call('GET', TERM) or '0')
if newest > tonumber(term) or (held and held ~= holder) then return 0 end
redis.call('SET', LEASE, holder, 'PX', ttl_ms)
redis.call('SET', TERM, string.format('%d', math.max(tonumber(term), above)))
return redis.call('INCR', TERM)
"""
)
"""Above what is known to have been, where the store has forgotten it. All else comes with one commit."""

RELEASE = (
    LUA
    + """
local holder, term = ARGV[1], ARGV[2]
if redis.call('GET', TERM) == term and redis.call('GET', LEASE) == holder then redis.call('DEL', LEASE) end
return 1
"""
)

LOAD = (
    LUA
    + """
local open = redis.call('SMEMBERS', JOBS_OPEN)
local records = {}
for i, id in ipairs(open) do records[i] = redis.call('GET', job_key(id)) end
local function kept(key) return redis.call('GET', key) or '' end
local cursor, commits = redis.call('GET', CURSOR) or '0', redis.call('GET', COMMITS) or '0'
local reigns = redis.call('LRANGE', REIGNS, 0, -1)
return {cursor, commits, records, reigns, kept(QUARANTINE), kept(CORDONS), kept(PROJECTS), kept(ADMISSIONS)}
"""
)

OVER = (
    LUA
    + """
local over = {}
for i, id in ipairs(ARGV) do over[i] = redis.call('SISMEMBER', JOBS_DONE, id) end
return over
"""
)

COMMIT = (
    LUA
    + _APPEND
    + """
-- term, sequence, commits that were confirmed, nodes, cursor, number of jobs, (id, when it ended or '', mark, record)...,
-- number of entries, (id, kind, cap, entry)..., quarantine, cordons, projects, queue, admissions; where the store went back
-- and this is all that was forgotten, commits there had been and reigns, one a line
local term, sequence = ARGV[1], tonumber(ARGV[2])
local newest = redis.call('GET', TERM) or '0'
local commits = redis.call('GET', COMMITS) or '0'
if tonumber(newest) > tonumber(term) then return {'STALE', newest} end
local had = tonumber(ARGV[#ARGV - 1])
if term ~= newest or (not had and tonumber(commits) < tonumber(ARGV[3])) then return {'BEHIND', commits} end
local applied = redis.call('GET', APPLIED) or ''
local applied_term, applied_sequence = string.match(applied, '^(%d+):(%d+)$')
if applied_term == term and sequence <= tonumber(applied_sequence) then return {'OK', commits} end
local at = 7
local num_jobs = tonumber(ARGV[6])
for i = 0, num_jobs - 1 do
  local id = ARGV[at + 4 * i]
  if redis.call('SISMEMBER', JOBS_DONE, id) == 1 then return {'CONFLICT', id} end
end
for i = 0, num_jobs - 1 do
  local id, ended_at, mark, record = ARGV[at + 4 * i], ARGV[at + 4 * i + 1], ARGV[at + 4 * i + 2], ARGV[at + 4 * i + 3]
  redis.call('SET', job_key(id), record)
  if redis.call('HGET', ids_key(id), 'mark') ~= mark then
    redis.call('HSET', ids_key(id), 'mark', mark)
    redis.call('HINCRBY', ids_key(id), 'revision', 1)
  end
  list_job(id)
  if ended_at ~= '' then
    redis.call('SADD', JOBS_DONE, id)
    redis.call('ZADD', JOBS_ENDED, ended_at, id)
    redis.call('SREM', JOBS_OPEN, id)
  else
    redis.call('SADD', JOBS_OPEN, id)
  end
end
at = at + 4 * num_jobs + 1
local num_entries = tonumber(ARGV[at - 1])
for i = 0, num_entries - 1 do
  append(ARGV[at + 4 * i], ARGV[at + 4 * i + 1], ARGV[at + 4 * i + 2], ARGV[at + 4 * i + 3])
end
at = at + 4 * num_entries
if ARGV[at] ~= '' then redis.call('SET', QUARANTINE, ARGV[at]) end
if ARGV[at + 1] ~= '' then redis.call('SET', CORDONS, ARGV[at + 1]) end
if ARGV[at + 2] ~= '' then redis.call('SET', PROJECTS, ARGV[at + 2]) end
if ARGV[at + 3] ~= '' then redis.call('SET', QUEUE, ARGV[at + 3]) end
if ARGV[at + 4] ~= '' then redis.call('SET', ADMISSIONS, ARGV[at + 4]) end
if ARGV[4] ~= '' then redis.call('SET', NODES, ARGV[4]) end
if ARGV[5] ~= '' then
  redis.call('SET', CURSOR, ARGV[5])
  redis.call('XTRIM', COMMANDS, 'MINID', '~', ARGV[5])
end
if had then
  if tonumber(commits) < had then redis.call('SET', COMMITS, ARGV[#ARGV - 1]) end
  redis.call('DEL', REIGNS)
  for reign in string.gmatch(ARGV[#ARGV], '[^\\n]+') do redis.call('RPUSH', REIGNS, reign) end
end
redis.call('SET', APPLIED, term..':'..ARGV[2])
return {'OK', tostring(redis.call('INCR', COMMITS))}
"""
)

SUBMIT = (
    LUA
    + _APPEND
    + """
-- Not put among JOBS_OPEN: a supervisor that starts now hears of it by the command alone, like one that is running.
local id, record, command, entry = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local key, body, key_ttl_s, cap, max_commands = ARGV[5], ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])
if key ~= '' then
  local used = redis.call('GET', idempotency_key(key))
  if used then
    local before, its_body = string.match(used, '^(%S+) (%S*)$')
    return {its_body == body and 'SAME' or 'CONFLICT', before}
  end
end
if redis.call('EXISTS', job_key(id)) == 1 then
  return {redis.call('HGET', ids_key(id), 'body') == body and 'SAME' or 'CONFLICT', id}
end
if redis.call('XLEN', COMMANDS) >= max_commands then return {'FULL', ''} end
redis.call('SET', job_key(id), record)
redis.call('HSET', ids_key(id), 'body', body, 'revision', 1)
list_job(id)
append(id, 'history', cap, entry)
redis.call('XADD', COMMANDS, '*', 'e', command)
if key ~= '' then redis.call('SET', idempotency_key(key), id..' '..body, 'EX', key_ttl_s) end
return {'NEW', id}
"""
)

COMMAND = (
    LUA
    + """
-- request, command, how many may wait, the job it is about or '', the revision it rests on or ''
local request, command, max_commands, job, expected = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local before = redis.call('GET', request_key(request))
if before then return {'OK', before} end
if expected ~= '' then
  local revision = redis.call('HGET', ids_key(job), 'revision') or '0'
  if revision ~= expected then return {'OUTDATED', revision} end
end
if redis.call('XLEN', COMMANDS) >= max_commands then return {'FULL', ''} end
local id = redis.call('XADD', COMMANDS, '*', 'e', command)
redis.call('SET', request_key(request), id, 'EX', 600)
if job ~= '' and redis.call('EXISTS', job_key(job)) == 1 then
  redis.call('HINCRBY', ids_key(job), 'revision', 1)
  redis.call('HSET', ids_key(job), 'asked', id)
end
return {'OK', id}
"""
)

OLD = (
    LUA
    + """
-- ended before, jobs kept, archived before, how many at a time
local kept, most = tonumber(ARGV[2]), tonumber(ARGV[4])
local old = redis.call('ZRANGEBYSCORE', JOBS_ENDED, '-inf', '('..ARGV[1], 'LIMIT', 0, most)
local spare = math.min(redis.call('ZCARD', JOBS_ENDED) - kept, most)
if spare > #old then old = redis.call('ZRANGE', JOBS_ENDED, 0, spare - 1) end
local records = {}
for i, id in ipairs(old) do records[i] = redis.call('GET', job_key(id)) end
return {old, records, redis.call('ZRANGEBYSCORE', JOBS_ARCHIVED, '-inf', '('..ARGV[3], 'LIMIT', 0, most)}
"""
)

RETIRE = (
    LUA
    + """
-- term, number to archive, (id, record)..., number to forget, id...
local term, num_old = ARGV[1], tonumber(ARGV[2])
local newest = redis.call('GET', TERM) or '0'
if term ~= newest then return {'STALE', newest} end
for i = 0, num_old - 1 do
  local id, record = ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  local at = redis.call('ZSCORE', JOBS_ENDED, id)
  if at then
    redis.call('SET', job_key(id), record)
    redis.call('DEL', stream_key(id, 'history'), stream_key(id, 'steps'))
    redis.call('ZREM', JOBS_ENDED, id)
    redis.call('ZADD', JOBS_ARCHIVED, at, id)
  end
end
local at = 3 + 2 * num_old
for i = 1, tonumber(ARGV[at]) do
  local id = ARGV[at + i]
  redis.call('DEL', job_key(id), ids_key(id))
  redis.call('ZREM', JOBS, id)
  redis.call('ZREM', JOBS_ARCHIVED, id)
  redis.call('SREM', JOBS_DONE, id)
end
return {'OK', ''}
"""
)
