-- Ends a generation, so that its entries are dead, and forgets the worker's liveness.
-- KEYS: fence, a slot's owner, its liveness. ARGV: epoch, generation that ends, a generation that no manager publishes.
-- Returns {fence, 1}, or {fence, 0} when the slot has another generation.
if field_of(KEYS[2], 'generation') ~= ARGV[2] then return {fence, 0} end
redis.call('HSET', KEYS[2], 'generation', ARGV[3])
redis.call('DEL', KEYS[3])
return {fence, 1}
