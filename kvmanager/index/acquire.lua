-- Takes an epoch and writes the fence. The rules and their reasons are `is_replaced` and `acquired` in contracts/epochs.py.
-- A manager of a group has a term too; after a manager of its group with a higher term it takes none.
-- KEYS: epoch counter, fence, highest term in which a manager of the caller's group took an epoch.
-- ARGV: least epoch that the caller may take; the epoch that the caller held (0: none); a random jump; the caller's
--       term (0: it is in no group).
-- Returns {1, epoch taken} or {0, fence of the manager that replaced the caller}.
local least, held = tonumber(ARGV[1]), tonumber(ARGV[2])
local replaced_by = epoch_in(KEYS[2], held) or 0
if held > 0 and replaced_by > held then return {0, replaced_by} end
local term = tonumber(ARGV[4])
if term > 0 and (epoch_in(KEYS[3], term) or 0) > term then return {0, epoch_in(KEYS[2], least) or 0} end
local counter, fence = epoch_in(KEYS[1], least), epoch_in(KEYS[2], least) or 0
local epoch = math.max((counter or 0) + 1, fence + 1, least)
if not counter then epoch = epoch + tonumber(ARGV[3]) end
local text = string.format('%.0f', epoch)
redis.call('SET', KEYS[1], text)
redis.call('SET', KEYS[2], text)
if term > 0 then redis.call('SET', KEYS[3], string.format('%.0f', term)) end
return {1, epoch}
