-- Gives the lease of a group up. KEYS: lease. ARGV: owner.
-- Returns 1, or 0 when another owner holds the lease, or nobody.
local text = redis.pcall('GET', KEYS[1])
if type(text) ~= 'string' or string.match(text, '^%d+ %d+ (%S+) ') ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
return 1
