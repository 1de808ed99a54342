-- Removes and adds entries of one worker. Entries of a dead generation on these keys are dropped too.
-- KEYS: fence, then keys of block entries, those to remove from first.
-- ARGV: epoch, own entry (6 bytes), lifetime in ms, number of removes, prefix of slot keys.
-- Returns {fence, number of keys}; number -1, and nothing is written, when the slot has another generation than the own
-- entry (`writable` in contracts/slots.py).
local entry, lifetime, removes, owners = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[5]
local own_slot, generations = string.sub(entry, 1, 2), {}

local function is_live(other)
  local a, b, c, d, e, f = string.byte(other, 1, 6)
  local slot = a + 256 * b
  local generation = generations[slot]
  if generation == nil then
    generation = tonumber(field_of(owners .. slot, 'generation') or '-1')
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

if not is_live(entry) then return {fence, -1} end
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
