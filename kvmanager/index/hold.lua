-- Takes or renews the lease of a group. The rules and their reasons are `granted` in group/leadership.py.
-- KEYS: lease, counter of terms.
-- The lease has no TTL: a full Redis evicts keys that have one, those that end first before all others.
-- ARGV: owner, own term (0: none), highest term seen, mark of a lease to seize ("": none), where terms begin,
--       address of the owner, namespace of its index, number of this renewal.
-- Returns {1, term} or {0, term, renewal, owner, address, namespace} of the lease that another owner holds.
local text = redis.pcall('GET', KEYS[1])
local least = tonumber(ARGV[3])
local held, renewal, owner, address, namespace
if type(text) == 'string' then
  held, renewal, owner, address, namespace = string.match(text, '^(%d+) (%d+) (%S+) (%S+) (%S*)$')
  held = held and #held <= 16 and #renewal <= 15 and tonumber(held) or nil
  if held and held > math.max(least, MAX_FOREIGN_EPOCH) + MAX_EPOCH_LEAD then held = nil end
end
local counter, term = epoch_in(KEYS[2], least), nil
if held and owner == ARGV[1] then
  term = held
elseif held and string.format('%.0f %.0f', held, tonumber(renewal)) ~= ARGV[4] then
  return {0, held, tonumber(renewal), owner, address, namespace}
elseif not held and tonumber(ARGV[2]) > 0 and counter == tonumber(ARGV[2]) then
  term = counter
else
  term = 1 + math.max(least, counter or 0, held or 0)
  if not counter then term = math.max(term, tonumber(ARGV[5])) end
  redis.call('SET', KEYS[2], string.format('%.0f', term))
end
local lease = string.format('%.0f', term) .. ' ' .. ARGV[8] .. ' ' .. ARGV[1] .. ' ' .. ARGV[6] .. ' ' .. ARGV[7]
redis.call('SET', KEYS[1], lease)
return {1, term}
