-- Stands before every script. The rule and its reason are `believed` in contracts/epochs.py.
-- Returns the epoch in a key, or nil where there is none, or none that a manager can have written.
local function epoch_in(key, known)
  local text = redis.pcall('GET', key)
  if type(text) ~= 'string' or #text > 16 or not string.match(text, '^%d+$') then return nil end
  local epoch = tonumber(text)
  if epoch > math.max(known, MAX_FOREIGN_EPOCH) + MAX_EPOCH_LEAD then return nil end
  return epoch
end
