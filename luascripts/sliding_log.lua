-- Sliding log: remembers the instant of every event of the last window.
-- KEYS[1]  bucket: sorted set of events by instant
-- ARGV[1]  charge, take or refund; check, peek and penalize write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          window
--          cost, which for a check includes what is ahead
--          capacity
--          the most events that are kept
-- ARGV[3]  ID of the request
-- Reply    packed doubles: now, 1 if the cost was spent, events that count,
--          instant of the newest, instant of the newest that is not of the
--          request, instant of the one that has to go for the cost to fit
-- Instants are microseconds since the epoch, spans are microseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local now, window, cost, capacity, most = struct.unpack('<ddddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
local after = string.format('(%.0f', now - window)

-- Returns the instant of the event of that rank; -1 is the newest.
local function instant(rank)
  return tonumber(call('ZRANGE', key, rank, rank, 'WITHSCORES')[2])
end

local n = math.min(cost, most, 100000)
if op == 'refund' then
  members(n, ARGV[3])
end
local used = call('ZCOUNT', key, after, '+inf')
local need, spent, other = cost, 0, 0
if op == 'charge' or op == 'take' and used + cost <= capacity then
  need, spent = 0, 1
  if n > 0 then
    if used == 0 then
      -- A bucket is not made that would never expire.
      assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    end
    -- A server that is full refuses what adds, but not after a write that does not.
    members(n, ARGV[3], now)
    -- The bucket outlives what it says: expiry cleans up, a second later.
    call('PEXPIRE', key, math.ceil(window / 1000) + 1001)
    call('ZREMRANGEBYSCORE', key, '-inf', now - window)
    used = call('ZCARD', key)
    local excess = used - most
    if excess > 0 then
      call('ZREMRANGEBYRANK', key, 0, excess - 1)
      used = used - excess
    end
  end
  local last = used > 0 and call('ZRANGE', key, -math.min(n + 1, used), -1, 'WITHSCORES') or {}
  for i = #last - 1, 1, -2 do
    if string.sub(last[i], 1, #ARGV[3]) ~= ARGV[3] then
      other = tonumber(last[i + 1])
      break
    end
  end
end

local blocking, excess = 0, used + need - capacity
if excess > 0 and used > 0 then
  blocking = instant(math.min(excess, used) - used - 1)
end
return struct.pack('<dddddd', now, spent, used, used > 0 and instant(-1) or 0, other, blocking)
