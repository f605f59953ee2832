-- GCRA: what was spent drains, one event after the other.
-- KEYS[1]  bucket: string of six packed doubles, the theoretical arrival time,
--          its rest in parts of a microsecond of which there are as many as
--          events, those events, the name of the busy time, what was refunded in
--          it, end of the penalty
-- ARGV[1]  charge, take, refund or penalize; check and peek write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          events in a window
--          how long the cost takes to drain; penalize: the end of the penalty
--          the rest of that, in the parts that events make
--          take: by how much the arrival time may be ahead; refund: the busy
--          time in which it was spent
--          take: the rest of that; refund: where in that time it drains
-- Reply    packed doubles: now, 1 if the cost was spent, and the bucket's
-- Instants are microseconds since the epoch, spans are microseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local now, events, whole, part, first, second = struct.unpack('<dddddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
local tat, rest, rate, busy, refunded, penalty = 0, 0, 0, 0, 0, 0
local stored = call('GET', key)
if stored then
  if #stored ~= 48 then
    return redis.error_reply('WRONGTYPE the key holds something else than a GCRA bucket')
  end
  tat, rest, rate, busy, refunded, penalty = struct.unpack('<dddddd', stored)
end

local spent, changed = 0, false
if op == 'charge' or op == 'take' then
  -- Sums stop at 2^53-1, the last integer a double holds exactly.
  local most = 9007199254740991
  local t, r, b, f = tat, rest, busy, refunded
  local empty = t < now or t == now and r == 0
  if empty or rate ~= events then
    if empty then
      t = now
    else
      local debt = t - now
      if r > 0 then
        debt = debt + 1
      end
      t = now + math.min(math.ceil(debt * (rate / events)), most - now)
    end
    r, f, b = 0, 0, math.max(b + 1, now)
  end
  t = math.min(t + whole, most)
  -- The sum of two rests can be more than a double holds exactly.
  local over = r - (events - part)
  if over >= 0 then
    t, r = math.min(t + 1, most), over
  else
    r = r + part
  end
  if t == most then
    r = 0
  end
  local fits = op == 'charge'
  if not fits and penalty <= now then
    local ahead = t - now
    fits = ahead < first or ahead == first and r <= second
  end
  if fits then
    spent, changed = 1, whole > 0 or part > 0
    if changed then
      tat, rest, rate, busy, refunded = t, r, events, b, f
    end
  end
elseif op == 'refund' then
  -- What has not drained goes, and what was spent later moves up.
  local left = second - refunded - now
  if busy == first and rate == events and tat > now and left > 0 and (whole > 0 or part > 0) then
    if left < whole or left == whole and tat - now > left then
      whole, part = left, 0
    end
    tat, rest = tat - whole, rest - part
    if rest < 0 then
      tat, rest = tat - 1, rest + rate
    end
    refunded = refunded + whole + (part > 0 and 1 or 0)
    if refunded > 4503599627370496 then
      -- Sums stay exact; what is refunded from now on was not spent in this
      -- busy time.
      busy, refunded = busy + 1, 0
    end
    changed = true
  end
elseif op == 'penalize' and penalty <= now then
  penalty, changed = whole, true
end
local bucket = struct.pack('<dddddd', tat, rest, rate, busy, refunded, penalty)
if changed then
  local last = math.max(rest > 0 and tat + 1 or tat, penalty)
  -- The bucket outlives what it says: expiry cleans up, a second later or more.
  call('SET', key, bucket, 'PX', math.max(math.ceil((last - now) / 1000), 0) + 1001)
end
return struct.pack('<dd', now, spent) .. bucket
