-- Reads the pins of operators. KEYS: the pins of the group, and those of no group where there is a group.
-- ARGV: most bytes. Returns {} without any, else {place of the key, bytes, value}: the value is absent beyond the most
-- bytes, and where the key holds no string (bytes is -1 then).
for place, key in ipairs(KEYS) do
  local value = redis.pcall('GET', key)
  if type(value) == 'table' then
    if string.find(value.err, 'WRONGTYPE', 1, true) then return {place, -1} end
    return value
  end
  if value then
    if #value > tonumber(ARGV[1]) then return {place, #value} end
    return {place, #value, value}
  end
end
return {}
