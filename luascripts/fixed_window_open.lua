-- Reads a fixed window bucket; opens a window with count 0 if none is open.
-- KEYS[1]  bucket: hash with c = count, r = reset (µs since the epoch)
-- ARGV[1]  window (µs)
-- ARGV[2]  now (µs since the epoch), or 0 for this server's clock
-- Reply    {count, reset, now}
local now = tonumber(ARGV[2])
if now == 0 then
  local t = redis.call('TIME')
  now = t[1] * 1000000 + t[2]
end
local b = redis.call('HMGET', KEYS[1], 'c', 'r')
local reset = tonumber(b[2])
if reset and reset > now then
  return {tonumber(b[1]), reset, now}
end
local window = tonumber(ARGV[1])
reset = now + window
redis.call('HSET', KEYS[1], 'c', 0, 'r', reset)
-- The reset alone decides; expiry cleans up, a second later or more.
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000) + 1001)
return {0, reset, now}
