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
-- The count stops at 2^53-1, the last integer a double holds exactly.
local most = 9007199254740991
local reset = tonumber(redis.call('HGET', KEYS[1], 'r') or 0)
if reset > now then
  local count = redis.call('HINCRBY', KEYS[1], 'c', ARGV[3])
  if count > most then
    count = most
    redis.call('HSET', KEYS[1], 'c', count)
  end
  return {count, reset, now}
end
local count = math.min(tonumber(ARGV[3]), most)
local window = tonumber(ARGV[1])
reset = now + window
redis.call('HSET', KEYS[1], 'c', count, 'r', reset)
-- The reset alone decides; expiry cleans up, a second later or more.
redis.call('PEXPIRE', KEYS[1], math.ceil(window / 1000) + 1001)
return {count, reset, now}
