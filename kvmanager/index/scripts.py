"""The Lua functions that change the prefix index; each checks the fence and acts in one atomic step.

All but ACQUIRE begin with FENCED: KEYS[1] is the fence, ARGV[1] the caller's epoch. If the fence is another (0: there
is none) they do nothing and return {fence}, otherwise {fence, result}. Keys that a function derives from the namespace
are not among KEYS: all keys of a namespace share a hash tag, hence a cluster slot.
"""

from __future__ import annotations

from typing import Final

# KEYS: epoch counter, fence.
# ARGV: least epoch that the caller may take; the epoch that it held, 0 for none; a random jump.
# The rules and their reasons are `is_replaced` and `acquired` of core/epochs.py.
# Returns {1, epoch taken} or {0, fence of the manager that replaced the caller}.
ACQUIRE: Final = """
local fence = tonumber(redis.call('GET', KEYS[2]) or '0')
local held = tonumber(ARGV[2])
if held > 0 and fence > held then return {0, fence} end
local counter = redis.call('GET', KEYS[1])
local epoch = math.max(tonumber(counter or '0') + 1, fence + 1, tonumber(ARGV[1]))
if not counter then epoch = epoch + tonumber(ARGV[3]) end
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[1], text)
redis.call('SET', KEYS[2], text)
return {1, epoch}
"""

_FENCED: Final = """
local fence = tonumber(redis.call('GET', KEYS[1]) or '0')
if fence ~= tonumber(ARGV[1]) then return {fence} end
"""

# ARGV: epoch, namespace, worker id, incarnation, address, generation, lease in ms, slots in all.
# Returns {fence, slot}; slot -1 when all are taken by live workers. A worker keeps the slot that it had.
REGISTER: Final = (
    _FENCED
    + """
local owners, alive, worker = ARGV[2] .. ':w:', ARGV[2] .. ':l:', ARGV[3]
local slot, dead = -1, -1
for candidate = 0, tonumber(ARGV[8]) - 1 do
  local owner = redis.call('HGET', owners .. candidate, 'worker_id')
  if owner == worker then
    slot = candidate
    break
  elseif not owner then
    slot = dead >= 0 and dead or candidate
    break
  elseif dead < 0 and redis.call('EXISTS', alive .. candidate) == 0 then
    dead = candidate
  end
end
if slot < 0 then slot = dead end
if slot >= 0 then
  redis.call('HSET', owners .. slot, 'worker_id', worker, 'incarnation', ARGV[4], 'address', ARGV[5],
             'generation', ARGV[6])
  redis.call('SET', alive .. slot, worker, 'PX', ARGV[7])
end
return {fence, slot}
"""
)

# KEYS: fence, then keys of block entries, those to remove from first. ARGV: epoch, own entry (6 bytes), lifetime in ms,
# number of removes, prefix of slot keys. Entries of a dead generation on these keys go with it. Returns {fence, keys}.
UPDATE: Final = (
    _FENCED
    + """
local entry, lifetime, removes, owners = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local own_slot, generations = string.sub(entry, 1, 2), {}

local function is_live(other)
  local a, b, c, d, e, f = string.byte(other, 1, 6)
  local slot = a + 256 * b
  local generation = generations[slot]
  if generation == nil then
    generation = tonumber(redis.call('HGET', owners .. slot, 'generation') or '-1')
    generations[slot] = generation
  end
  return generation == c + 256 * d + 65536 * e + 16777216 * f
end

local function entries_of_others(value)
  local kept = {}
  for at = 1, #value - 5, 6 do
    local other = string.sub(value, at, at + 5)
    if string.sub(other, 1, 2) ~= own_slot and is_live(other) then kept[#kept + 1] = other end
  end
  return table.concat(kept)
end

local values = #KEYS > 1 and redis.call('MGET', unpack(KEYS, 2)) or {}
for index, value in ipairs(values) do
  local key = KEYS[index + 1]
  local others = value and entries_of_others(value) or ''
  if index > removes then
    redis.call('SET', key, others .. entry, 'PX', lifetime)
  elseif others ~= '' then
    redis.call('SET', key, others, 'KEEPTTL')
  elseif value then
    redis.call('DEL', key)
  end
end
return {fence, #values}
"""
)

# KEYS: fence, then liveness keys. ARGV: epoch, lease in ms, then a worker id a key. Returns {fence, keys}.
RENEW: Final = (
    _FENCED
    + """
for index = 2, #KEYS do redis.call('SET', KEYS[index], ARGV[index + 1], 'PX', ARGV[2]) end
return {fence, #KEYS - 1}
"""
)

# KEYS: fence, a slot's owner, its liveness. ARGV: epoch, generation that ends, one that nobody publishes.
# Returns {fence, 1}, or {fence, 0} when the slot has another generation by now.
RETIRE: Final = (
    _FENCED
    + """
if redis.call('HGET', KEYS[2], 'generation') ~= ARGV[2] then return {fence, 0} end
redis.call('HSET', KEYS[2], 'generation', ARGV[3])
redis.call('DEL', KEYS[3])
return {fence, 1}
"""
)
