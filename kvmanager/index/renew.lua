-- Prolongs the liveness of workers.
-- KEYS: fence, then liveness keys. ARGV: epoch, lease in ms, then one worker id for each key.
-- Returns {fence, number of keys}.
for index = 2, #KEYS do redis.call('SET', KEYS[index], ARGV[index + 1], 'PX', ARGV[2]) end
return {fence, #KEYS - 1}
