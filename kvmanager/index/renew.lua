-- Prolongs the liveness of workers whose slots have the generations of this manager (`writable` in contracts/slots.py).
-- KEYS: fence, then owner and liveness of each slot. ARGV: epoch, lease in ms, then the generation of each slot.
-- Returns {fence, places}: which of the slots, from 1, have another generation; -1 and so on for those that have none.
local lost = {}
for place = 1, (#KEYS - 1) / 2 do
  local owner, alive = KEYS[2 * place], KEYS[2 * place + 1]
  local generation = field_of(owner, 'generation')
  if generation == ARGV[place + 2] then
    redis.call('SET', alive, redis.call('HGET', owner, 'worker_id') or '', 'PX', ARGV[2])
  else
    lost[#lost + 1] = generation and place or -place
  end
end
return {fence, lost}
