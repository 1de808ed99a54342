-- Gives a worker a slot and a generation. A worker keeps the slot that it had.
-- ARGV: epoch, namespace, worker id, incarnation, address, generation, lease in ms, number of slots.
-- Returns {fence, slot}; slot -1 when live workers hold all slots.
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
