-- Gives a worker a slot and a generation. A worker keeps the slot that it had.
-- The rules and their reasons are `registered` and `may_follow` in contracts/slots.py.
-- ARGV: epoch, namespace, worker id, incarnation, address, generation, lease in ms, number of slots, session, group.
-- Returns {fence, slot}; slot -1 when live workers hold all slots, -2 when another group publishes this worker.
local owners, alive, worker = ARGV[2] .. ':w:', ARGV[2] .. ':l:', ARGV[3]
local slot, dead = -1, -1

local function may_follow(own)
  local function held(field) return redis.call('HGET', owners .. own, field) or '' end
  if held('incarnation') == ARGV[4] then return (tonumber(held('session')) or 0) <= tonumber(ARGV[9]) end
  return held('group') == ARGV[10] or redis.call('EXISTS', alive .. own) == 0
end

for candidate = 0, tonumber(ARGV[8]) - 1 do
  local owner = field_of(owners .. candidate, 'worker_id')
  if owner == worker then
    if not may_follow(candidate) then return {fence, -2} end
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
             'generation', ARGV[6], 'session', ARGV[9], 'group', ARGV[10])
  redis.call('SET', alive .. slot, worker, 'PX', ARGV[7])
end
return {fence, slot}
