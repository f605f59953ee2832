-- Spends in the fixed window that is open now; opens one if none is.
-- KEYS[1]  bucket: hash with c = count, r = reset (µs since the epoch)
-- ARGV[1]  window (µs)
-- ARGV[2]  now (µs since the epoch), or 0 for this server's clock; or, less
--          than 0, the negative of an instant that this clock has passed
-- ARGV[3]  cost
-- Reply    {count, reset, now}, the cost included in count; now is 0 if it was
--          not needed
local call = redis.call
local now = tonumber(ARGV[2])
local reset = tonumber(call('HGET', KEYS[1], 'r') or 0)
-- A window that ends more than a minute after the instant that has passed is
-- taken for open without reading the clock, which is a fifth of the work. The
-- minute is for a server that was stopped while the command waited in it.
local open = now < 0 and reset + now > 60000000
if open then
  now = 0
else
  if now <= 0 then
    local t = call('TIME')
    now = t[1] * 1000000 + t[2]
  end
  open = reset > now
end
-- The count stops at 2^53-1, the last integer a double holds exactly.
local most = 9007199254740991
local count
if open then
  count = call('HINCRBY', KEYS[1], 'c', ARGV[3])
  if count > most then
    count = most
    call('HSET', KEYS[1], 'c', count)
  end
  return {count, reset, now}
end
count = math.min(tonumber(ARGV[3]), most)
local window = tonumber(ARGV[1])
reset = now + window
call('HSET', KEYS[1], 'c', count, 'r', reset)
-- The reset alone decides; expiry cleans up, a second later or more.
call('PEXPIRE', KEYS[1], math.ceil(window / 1000) + 1001)
return {count, reset, now}
