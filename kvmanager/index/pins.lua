-- Keeps the pins of operators. KEYS: fence, pins. ARGV: epoch, value (empty: there are no pins), whether to keep an
-- empty value: a group without the key would take the pins of no group. Returns {fence, 1}.
if ARGV[2] == '' and ARGV[3] == '0' then redis.call('DEL', KEYS[2]) else redis.call('SET', KEYS[2], ARGV[2]) end
return {fence, 1}
