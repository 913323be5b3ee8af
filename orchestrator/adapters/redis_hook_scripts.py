"""Webhooks' writes, each one Lua script, harmless when sent twice: ids are the same for the same thing told.

Nothing here is part of a submission or of a supervisor's commit: who sends looks at what those have written anyway.
"""

from __future__ import annotations

from .redis_keys import LUA

_KEYS = (
    LUA
    + """
local HOOKS, STANDING, LEASE_OF_HOOKS = PREFIX..'hooks', PREFIX..'hooks:standing', PREFIX..'hooks:lease'
local MADE, READ, SEEN, DUE = PREFIX..'hooks:made', PREFIX..'hooks:read', PREFIX..'hooks:nodes', PREFIX..'hooks:due'
local MADE_MESSAGES = PREFIX..'hooks:messages'
local function log_key(hook) return PREFIX..'hook:'..hook..':deliveries' end
local function order_key(hook) return PREFIX..'hook:'..hook..':order' end
local function held_key(hook) return PREFIX..'hook:'..hook..':held' end
local function drop(hook, id)
  redis.call('HDEL', log_key(hook), id)
  redis.call('ZREM', order_key(hook), id)
  redis.call('ZREM', held_key(hook), id)
  redis.call('ZREM', DUE, hook..'/'..id)
end
local function hold_all(hook)
  for _, id in ipairs(redis.call('ZRANGE', order_key(hook), 0, -1)) do
    local at = redis.call('ZSCORE', DUE, hook..'/'..id)
    if at then
      redis.call('ZADD', held_key(hook), at, id)
      redis.call('ZREM', DUE, hook..'/'..id)
    end
  end
end
local function put(hook, id, due, delivery, cap)
  redis.call('HSET', log_key(hook), id, delivery)
  if not redis.call('ZSCORE', order_key(hook), id) then
    redis.call('ZADD', order_key(hook), redis.call('INCR', MADE_MESSAGES), id)
  end
  redis.call('ZADD', DUE, due, hook..'/'..id)
  while redis.call('ZCARD', order_key(hook)) > cap do drop(hook, redis.call('ZRANGE', order_key(hook), 0, 0)[1]) end
end
"""
)

ADD = (
    _KEYS
    + """
-- id, hook, how many there may be. The first one begins with what happens from now on.
local id, hook, most = ARGV[1], ARGV[2], tonumber(ARGV[3])
if redis.call('HEXISTS', HOOKS, id) == 1 then return {'OK', ''} end
if redis.call('HLEN', HOOKS) >= most then return {'FULL', ''} end
if redis.call('HLEN', HOOKS) == 0 then
  redis.call('DEL', READ, SEEN)
  redis.call('SET', MADE, redis.call('GET', JOBS_MADE) or '0')
  for _, job in ipairs(redis.call('ZRANGE', JOBS, 0, -1)) do
    if redis.call('SISMEMBER', JOBS_DONE, job) == 0 then
      redis.call('HSET', READ, job, redis.call('HGET', ids_key(job), 'history') or '0')
    end
  end
end
redis.call('HSET', HOOKS, id, hook)
return {'OK', ''}
"""
)

REMOVE = (
    _KEYS
    + """
local hook = ARGV[1]
local was = redis.call('HDEL', HOOKS, hook)
for _, id in ipairs(redis.call('ZRANGE', order_key(hook), 0, -1)) do redis.call('ZREM', DUE, hook..'/'..id) end
redis.call('DEL', log_key(hook), order_key(hook), held_key(hook))
redis.call('HDEL', STANDING, hook)
if redis.call('HLEN', HOOKS) == 0 then redis.call('DEL', MADE, READ, SEEN, DUE, MADE_MESSAGES) end
return {was == 1 and 'OK' or 'GONE', ''}
"""
)

PAUSE = (
    _KEYS
    + """
-- hook, standing
if redis.call('HEXISTS', HOOKS, ARGV[1]) == 0 then return {'GONE', ''} end
redis.call('HSET', STANDING, ARGV[1], ARGV[2])
hold_all(ARGV[1])
return {'OK', ''}
"""
)

RESUME = (
    _KEYS
    + """
-- hook, now
local hook = ARGV[1]
if redis.call('HEXISTS', HOOKS, hook) == 0 then return {'GONE', ''} end
redis.call('HDEL', STANDING, hook)
for _, id in ipairs(redis.call('ZRANGE', held_key(hook), 0, -1)) do redis.call('ZADD', DUE, ARGV[2], hook..'/'..id) end
redis.call('DEL', held_key(hook))
return {'OK', ''}
"""
)

PUT = (
    _KEYS
    + """
-- hook, id, due, delivery, cap
if redis.call('HEXISTS', HOOKS, ARGV[1]) == 0 then return {'GONE', ''} end
redis.call('ZREM', held_key(ARGV[1]), ARGV[2])
put(ARGV[1], ARGV[2], ARGV[3], ARGV[4], tonumber(ARGV[5]))
return {'OK', ''}
"""
)

HOLD = (
    _KEYS
    + """
-- holder, for how many ms
local held = redis.call('GET', LEASE_OF_HOOKS)
if redis.call('HLEN', HOOKS) == 0 or (held and held ~= ARGV[1]) then return 0 end
redis.call('SET', LEASE_OF_HOOKS, ARGV[1], 'PX', ARGV[2])
return 1
"""
)

RELEASE = (
    _KEYS
    + """
if redis.call('GET', LEASE_OF_HOOKS) == ARGV[1] then redis.call('DEL', LEASE_OF_HOOKS) end
return 1
"""
)

UNREAD = (
    _KEYS
    + """
-- where in the jobs to go on, how many of them to look at, how many new submissions to take in. A part at a time, so that
-- nobody else waits for long.
redis.replicate_commands()  -- before Redis 7, as a scan is followed by writes
if ARGV[1] == '0' then
  local made = redis.call('GET', MADE) or '0'
  local new = redis.call('ZRANGEBYSCORE', JOBS, '('..made, '+inf', 'WITHSCORES', 'LIMIT', 0, tonumber(ARGV[3]))
  for i = 1, #new, 2 do
    redis.call('HSETNX', READ, new[i], '0')
    redis.call('SET', MADE, new[i + 1])
  end
end
local part = redis.call('HSCAN', READ, ARGV[1], 'COUNT', ARGV[2])
local found, all = {part[1]}, part[2]
for i = 1, #all, 2 do
  local last = redis.call('HGET', ids_key(all[i]), 'history')
  if not last then
    redis.call('HDEL', READ, all[i])
  elseif tonumber(last) > tonumber(all[i + 1]) then
    table.insert(found, all[i])
    table.insert(found, all[i + 1])
  end
end
return found
"""
)

NOTE = (
    _KEYS
    + """
-- holder, cap, nodes or '', number of jobs, (job, read or '')..., number of deliveries, (hook, id, due, delivery)...
if redis.call('GET', LEASE_OF_HOOKS) ~= ARGV[1] then return {'STALE', ''} end
local cap, num_jobs = tonumber(ARGV[2]), tonumber(ARGV[4])
if ARGV[3] ~= '' then redis.call('SET', SEEN, ARGV[3]) end
for i = 0, num_jobs - 1 do
  local job, read = ARGV[5 + 2 * i], ARGV[6 + 2 * i]
  if read == '' then redis.call('HDEL', READ, job) else redis.call('HSET', READ, job, read) end
end
local at = 6 + 2 * num_jobs
for i = 0, tonumber(ARGV[at - 1]) - 1 do
  local hook, id = ARGV[at + 4 * i], ARGV[at + 4 * i + 1]
  local is_known = redis.call('HEXISTS', log_key(hook), id) == 1
  if redis.call('HEXISTS', HOOKS, hook) == 1 and not is_known then
    put(hook, id, ARGV[at + 4 * i + 2], ARGV[at + 4 * i + 3], cap)
  end
end
return {'OK', ''}
"""
)

DUE = (
    _KEYS
    + """
-- now, how many, and of each hook: one with many to send hides nobody else's
local found, taken, most, each = {}, {}, tonumber(ARGV[2]), tonumber(ARGV[3])
for _, member in ipairs(redis.call('ZRANGEBYSCORE', DUE, '-inf', ARGV[1])) do
  if #found >= most then break end
  local hook, id = string.match(member, '^([^/]+)/(.+)$')
  taken[hook] = (taken[hook] or 0) + 1
  local delivery = taken[hook] <= each and redis.call('HGET', log_key(hook), id)
  if delivery then table.insert(found, delivery) end
end
return found
"""
)

TRIED = (
    _KEYS
    + """
-- holder, hook, id, delivery, due or '', standing before or '', standing or '' for the same, whether that is paused
if redis.call('GET', LEASE_OF_HOOKS) ~= ARGV[1] then return {'STALE', ''} end
local hook, id = ARGV[2], ARGV[3]
if (redis.call('HGET', STANDING, hook) or '') ~= ARGV[6] then return {'CHANGED', ''} end
if redis.call('HEXISTS', log_key(hook), id) == 1 then
  redis.call('HSET', log_key(hook), id, ARGV[4])
  if ARGV[5] == '' then redis.call('ZREM', DUE, hook..'/'..id) else redis.call('ZADD', DUE, ARGV[5], hook..'/'..id) end
end
if redis.call('HEXISTS', HOOKS, hook) == 1 then
  if ARGV[7] ~= '' then redis.call('HSET', STANDING, hook, ARGV[7]) end
  if ARGV[8] == '1' then hold_all(hook) end
end
return {'OK', ''}
"""
)
