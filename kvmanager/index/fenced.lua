-- Stands before every script but acquire.lua. KEYS[1] is the fence, ARGV[1] the caller's epoch.
-- If the fence is another epoch (0: there is none), the script does nothing and returns {fence}.
local fence = epoch_in(KEYS[1], tonumber(ARGV[1])) or 0
if fence ~= tonumber(ARGV[1]) then return {fence} end
