-- Stands before scripts that read the owners of slots. Returns a field of a hash. A key of another type, which no manager
-- writes, is deleted: nothing would be published any more, for as long as it stood there.
local function field_of(key, field)
  local value = redis.pcall('HGET', key, field)
  if type(value) ~= 'table' then return value end
  if not string.find(value.err, 'WRONGTYPE', 1, true) then error(value.err) end
  redis.call('DEL', key)
  return false
end
