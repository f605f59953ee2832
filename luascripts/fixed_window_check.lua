-- Reads a fixed window bucket and changes nothing; runs on replicas too.
-- KEYS[1]  bucket: hash with c = count, r = reset (µs since the epoch)
-- ARGV[1]  now (µs since the epoch)
-- Reply    {count, reset}; {0, 0} if no window is open
local b = redis.call('HMGET', KEYS[1], 'c', 'r')
local reset = tonumber(b[2])
if reset and reset > tonumber(ARGV[1]) then
  return {tonumber(b[1]), reset}
end
return {0, 0}
