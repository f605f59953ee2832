-- GCRA: what was spent drains, one event after the other.
-- KEYS[1]  bucket: string of seven packed doubles, the theoretical arrival time,
--          its rest in parts of a microsecond of which there are as many as
--          events, those events, the name of the busy time, the events spent in it
--          but for those that were last and were refunded, the highest rate in it,
--          end of the penalty
-- ARGV[1]  charge, take, refund or penalize; check and peek write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          window
--          events in a window
--          cost; penalize: the end of the penalty
--          how long the cost takes to drain
--          the rest of that, in the parts that events make
--          take: by how much the arrival time may be ahead; refund: the busy
--          time in which it was spent
--          take: the rest of that; refund: how much had been spent in it then
--          refund: the instant at which it was spent
--          how long a penalty lasts at most, or 0 if that is not known
-- Reply    packed doubles: now, 1 if the cost was spent, and the bucket's
-- Instants are microseconds since the epoch, spans are microseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local now, window, events, cost, whole, part, first, second, third, lasts = struct.unpack('<dddddddddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
local tat, rest, rate, busy, sum, fastest, penalty = 0, 0, 0, 0, 0, 0, 0
local stored = call('GET', key)
if stored then
  if #stored ~= 56 then
    return redis.error_reply('WRONGTYPE the key holds something else than a GCRA bucket')
  end
  tat, rest, rate, busy, sum, fastest, penalty = struct.unpack('<ddddddd', stored)
  -- Costs may take any time to drain, but their busy time has begun.
  if busy - now > grace then
    tat, rest, rate, busy, sum, fastest, penalty = 0, 0, 0, 0, 0, 0, 0
  elseif lasts > 0 and penalty - now > lasts + grace then
    penalty = 0
  end
end

-- Sums stop at 2^53-1, the last integer a double holds exactly.
local most = 9007199254740991
local spent, changed = 0, false
if op == 'charge' or op == 'take' then
  local t, r, b, n, f = tat, rest, busy, sum, fastest
  local last = r > 0 and t + 1 or t
  if last <= now then
    t, r, n, b, f = now, 0, 0, math.max(b + 1, now), 0
  elseif rate ~= events then
    t, r = now + math.min(math.ceil((last - now) * (rate / events)), most - now), 0
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
  if n > most - cost then
    -- What is refunded from now on was not spent in this busy time.
    b, n = b + 1, 0
  end
  local fits = op == 'charge'
  if not fits and penalty <= now then
    local ahead = t - now
    fits = cost == 0 or ahead < first or ahead == first and r <= second
  end
  if fits then
    spent, changed = 1, cost > 0
    if changed then
      tat, rest, rate, busy, sum, fastest = t, r, events, b, n + cost, math.max(f, events)
    end
  end
elseif op == 'refund' then
  -- What has not drained goes, and what was spent later moves up.
  local later, left = math.max(sum - second, 0), tat - now
  if busy == first and left > 0 and cost > 0 then
    local rates = events / rate
    if rates ~= 1 then
      whole, part = math.min(math.floor(whole * rates), most), 0
    end
    local drained = math.ceil(math.max(now - third, 0) * (fastest / rate))
    local undrained = math.min(math.max(left - math.ceil(later * (window / rate)), whole - drained), left)
    if undrained > 0 then
      if undrained < whole or undrained == whole and later > 0 then
        whole, part = undrained, 0
      end
      tat, rest, changed = tat - whole, rest - part, true
      if rest < 0 then
        tat, rest = tat - 1, rest + rate
      end
      if later == 0 then
        sum = math.max(sum - cost, 0)
      end
    end
  end
elseif op == 'penalize' and penalty <= now then
  penalty, changed = cost, true
end
local bucket = struct.pack('<ddddddd', tat, rest, rate, busy, sum, fastest, penalty)
if changed then
  -- The bucket outlives what it says: expiry cleans up, a second later or more.
  local last = math.max(rest > 0 and tat + 1 or tat, penalty)
  call('SET', key, bucket, 'PX', math.max(math.ceil((last - now) / 1000), 0) + 1001)
end
return struct.pack('<dd', now, spent) .. bucket
