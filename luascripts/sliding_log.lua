-- Sliding log: remembers the instant of every request of the last window.
-- KEYS[1]  bucket: sorted set of requests, as members.lua says, by instant
-- ARGV[1]  charge, take or refund; check, peek and penalize write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          window
--          cost, which for a check includes what is ahead
--          capacity
--          charge: when what is late stops counting, less than 0 for minus the time
--          that is left, or 0
-- ARGV[3]  ID of the request
-- Reply    packed doubles: now, 1 if the cost was spent, events that count,
--          instant of the newest, instant of the newest that is not of the
--          request, instant of the one that has to go for the cost to fit
-- Instants are microseconds since the epoch, spans are microseconds.
local op, id = ARGV[1], ARGV[3]
local now, window, cost, capacity, ends, tail = struct.unpack('<ddddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
local gone = now - window

-- Events of the future are not believed: a write removes them, and others do not
-- count them.
local latest = now + grace

-- Returns the last instant from which on the members cost more than room.
local function beyond(room, last)
  if room < 0 then
    return last
  elseif top == 0 then
    local rank = -room - 1 - call('ZCOUNT', key, string.format('(%.17g', latest), '+inf')
    return math.floor(tonumber(call('ZRANGE', key, rank, rank, 'WITHSCORES')[2]))
  end
  -- The span is halved until it has few members; those after it cost newer.
  local first, newer, after = math.max(gone, 0), 0, 0
  local _, number = count(first, latest)
  while number - after > 64 do
    local middle = math.floor((first + last) / 2)
    if middle == first then
      return last
    end
    local sum, n = count(middle, latest)
    if sum > room then
      first, number = middle, n
    else
      last, newer, after = middle, sum, n
    end
  end
  local found = {}
  for k = 0, top do
    local unit = 2 ^ (53 * k)
    local some = call('ZRANGE', key, string.format('(%.17g', math.max(first, 0.5) * unit), last * unit, 'BYSCORE', 'WITHSCORES')
    for i = 2, #some, 2 do
      found[#found + 1] = { at = math.floor(tonumber(some[i]) / unit), cost = 2 ^ k }
    end
  end
  table.sort(found, function(a, b)
    return a.at > b.at
  end)
  for _, one in ipairs(found) do
    newer = newer + one.cost
    if newer > room then
      return one.at
    end
  end
end

local n = math.min(cost, 100000)
if op == 'charge' and ends ~= 0 then
  ends = ends < 0 and now - ends or ends
  if ends <= now then
    n = 0
  end
end
if op == 'charge' or op == 'take' or op == 'refund' then
  trim(latest + 1, never)
end
if op == 'refund' and n > 0 then
  drop(id, n, window)
end
local used, number = count(gone, latest)
local need, spent, last, other = cost, 0, 0, 0
if op == 'charge' or op == 'take' and (cost == 0 or used + cost <= capacity) then
  need, spent = 0, 1
  if n > 0 then
    if used == 0 then
      -- A bucket is not made that would never expire.
      assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    end
    -- A server that is full refuses what adds, but not after a write that does not.
    put(id, n, op == 'charge' and ends ~= 0 and math.min(ends, now + window) - window or now)
    -- The bucket outlives what it says, by a clock that is set back too: expiry cleans up.
    call('PEXPIRE', key, math.ceil((window + grace) / 1000) + 1001)
    used, number = count(gone, latest)
    if number > most then
      trim(0, beyond(most - 1, newest(id, latest)) - 1)
    elseif number < call('ZCARD', key) then
      trim(0, gone)
    end
  end
end
if used > 0 then
  last, other = newest(id, latest)
  other = spent == 1 and other > gone and other or 0
end

local blocking, room = 0, capacity - need
if used > math.max(room, 0) then
  blocking = beyond(room, last)
end
return struct.pack('<dddddd', now, spent, math.min(used, most), last, other, blocking), tail, cost, spent == 1 and capacity - used, capacity, now + window
