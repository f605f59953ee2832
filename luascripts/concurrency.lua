-- Concurrency: leases of what runs at the same time.
-- KEYS[1]  bucket: sorted set of requests, as members.lua says, by the expiry of
--          their leases
-- ARGV[1]  charge, take or refund; check, peek and penalize write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          how long a lease lasts
--          cost, which for a check includes what is ahead
--          capacity
-- ARGV[3]  ID of the request
-- Reply    packed doubles: now, 1 if the leases were taken, leases there are
-- Instants are microseconds since the epoch, spans are microseconds.
local op = ARGV[1]
local now, window, cost, capacity = struct.unpack('<dddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- A lease that would last longer is not believed.
local latest = now + window + grace
if op == 'check' or op == 'peek' or op == 'penalize' then
  return struct.pack('<ddd', now, 0, math.min((count(now, latest)), most))
end

local n = math.min(cost, 100000)
-- A server that is full refuses no write after this one, which removes nothing: leases
-- are few, and have to be renewed.
call('ZREMRANGEBYRANK', key, 1, 0)
trim(0, now)
trim(latest + 1, never)
if op == 'refund' and n > 0 then
  drop(ARGV[3], n, window)
end
local used, spent = count(now, latest), 0
if op == 'charge' or op == 'take' and (cost == 0 or used + cost <= capacity) then
  spent = 1
  if n > 0 then
    if used == 0 then
      -- A bucket is not made that would never expire.
      assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    end
    put(ARGV[3], n, now + window)
    -- The bucket outlives what it says, by a clock that is set back too: expiry cleans up.
    call('PEXPIRE', key, math.ceil((window + grace) / 1000) + 1001)
    used = count(now, latest)
  end
end
return struct.pack('<ddd', now, spent, math.min(used, most))
