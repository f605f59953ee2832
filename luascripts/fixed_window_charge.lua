-- Spends in the fixed window that is open now; opens one if none is.
-- KEYS[1]  bucket: hash with c = count, r = reset (µs since the epoch)
-- ARGV[1]  window (µs)
-- ARGV[2]  now (µs since the epoch), or 0 for this server's clock
-- ARGV[3]  cost
-- Reply    {count, reset, now}, the cost included in count
local now = tonumber(ARGV[2])
if now == 0 then
  local t = redis.call('TIME')
  now = t[1] * 1000000 + t[2]
end
local b = redis.call('HMGET', KEYS[1], 'c', 'r')
local reset = tonumber(b[2])
if reset and reset > now then
  -- The count stops at 2^53-1, the last integer a double holds exactly.
  local count = math.min(b[1] + ARGV[3], 9007199254740991)
  redis.call('HSET', KEYS[1], 'c', count)
  return {count, reset, now}
end
local count = math.min(tonumber(ARGV[3]), 9007199254740991)
local window = tonumber(ARGV[1])
reset = now + window
redis.call('HSET', KEYS[1], 'c', count, 'r', reset)
-- The reset alone decides; expiry cleans up, a second later or more.
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000) + 1001)
return {count, reset, now}
