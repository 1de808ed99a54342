-- Takes an epoch and writes the fence. The rules and their reasons are `is_replaced` and `acquired` in core/epochs.py.
-- KEYS: epoch counter, fence.
-- ARGV: least epoch that the caller may take; the epoch that the caller held (0: none); a random jump.
-- Returns {1, epoch taken} or {0, fence of the manager that replaced the caller}.
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
