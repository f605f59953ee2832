-- GCRA: what was spent drains. Each cost adds the time in which it drains at its own
-- rate, and where rates differ, all that is there drains at their mean.
-- KEYS[1]  bucket: string of seven packed doubles, the theoretical arrival time,
--          its rest in parts of a microsecond of which there are as many as
--          events, the events that drain in a span, the beginning of the busy
--          time, the events spent in it but for those that were last and were
--          refunded, that span, end of the penalty
-- ARGV[1]  charge, take, refund or penalize; check and peek write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          window
--          events in a window
--          cost; penalize: the end of the penalty
--          how long the cost takes to drain
--          the rest of that, in the parts that events make
--          charge and take: by how much the arrival time of what is full is
--          ahead; refund: the instant at which it was spent
--          take: the rest of that; refund: how much had been spent in the busy
--          time then
--          take and refund: the capacity
--          how long a penalty lasts at most
--          charge and take: the arrival time of a bucket that is empty, less
--          than 0 for minus the time that is left, or 0
-- Reply    packed doubles: now, 1 if the cost was spent, and the bucket's
-- Instants are microseconds since the epoch, spans are microseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local now, window, events, cost, whole, part, first, second, capacity, lasts, arrives, tail = struct.unpack('<ddddddddddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
-- Sums stop at 2^53-1, the last integer a double holds exactly.
local most = 9007199254740991
-- What a mean rate may be wrong by.
local exactness = 1 / 2 ^ 40
local tat, rest, rate, busy, sum, span, penalty = 0, 0, 0, 0, 0, 0, 0
local stored = call('GET', key)
if stored then
  if #stored ~= 56 then
    return redis.error_reply('WRONGTYPE the key holds something else than a GCRA bucket')
  end
  tat, rest, rate, busy, sum, span, penalty = struct.unpack('<ddddddd', stored)
  -- Costs may take any time to drain, but their busy time has begun, and no more has
  -- to drain than was spent in it. The rest is less than a microsecond.
  if not sound(tat, rest, rate, busy, sum, span, penalty) or busy - now > grace then
    tat, rest, rate, busy, sum, span, penalty = 0, 0, 0, 0, 0, 0, 0
  elseif penalty - now > lasts + grace then
    penalty = 0
  end
  if rest >= rate or span == 0 or tat - now > math.min(math.ceil(sum * (span / rate * (1 + exactness))), most) + grace then
    tat, rest, busy, sum = 0, 0, 0, 0
  end
end

local spent, changed, leaves = 0, false, nil
local last = rest > 0 and tat + 1 or tat
-- How many events have not drained: no more than were spent, also by a clock that is
-- behind.
local function count()
  return math.min((tat - now) * (rate / span) + rest / span, sum)
end
-- The rate at which n events drain in a time.
local function mean(time, n)
  local each = math.min(time / math.min(n, most), most)
  rate = math.floor(most / math.max(each, 1))
  span = math.min(math.max(math.floor(each * rate), 1), most)
end
local opens = op == 'charge' and cost > 0 or op == 'take' and penalty <= now
-- No empty bucket becomes more than full, whatever a caller says.
arrives = math.min(arrives < 0 and now - arrives or arrives, now + first, most)
if opens and last <= now and arrives > now then
  tat, rest, last, rate, span, changed = arrives, 0, arrives, events, window, true
  busy, sum = math.max(busy, now), math.min(math.ceil((tat - now) * (rate / span)), most)
end
if op == 'charge' or op == 'take' then
  if last <= now then
    tat, rest, last, sum, rate, span = now, 0, now, 0, events, window
    busy = math.max(busy, now)
  end
  local same, fits = rate == events and span == window, op == 'charge'
  local t, r, n = tat, rest, count()
  if same then
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
  end
  if not fits and penalty <= now then
    local ahead = t - now
    if same then
      fits = cost == 0 or ahead < first or ahead == first and r <= second
    else
      fits = cost == 0 or math.min(math.ceil(n * (1 - exactness)), most) <= capacity - cost
    end
  end
  spent = fits and 1 or 0
  if fits and cost > 0 then
    tat, rest, changed = t, r, true
    if not same then
      tat, rest = math.min(last + whole + (part > 0 and 1 or 0), most), 0
      mean(tat - now, n + cost)
    end
    if sum > most - cost then
      -- What is refunded from now on was not spent in this busy time.
      busy, sum = math.max(busy, now) + 1, most - cost
    end
    sum = sum + cost
    leaves = #ARGV[2] >= tail and capacity - math.min(math.ceil(count() * (1 - exactness)), most)
  end
elseif op == 'refund' then
  -- What has not drained goes, and what was spent later moves up.
  local later, since, left, back = math.max(sum - second, 0), math.max(now - first, 0), tat - now, cost
  if first < busy or left <= 0 or cost == 0 then
    changed = false
  elseif rate == events and span == window then
    local undrained = math.min(math.max(left - math.ceil(later * (span / rate)), whole - since), left)
    if undrained > 0 then
      if undrained < whole or undrained == whole and later > 0 then
        whole, part = undrained, 0
      end
      tat, rest, changed = tat - whole, rest - part, true
      if rest < 0 then
        tat, rest = tat - 1, rest + rate
      end
    end
  else
    -- Where rates differ, all events shrink alike.
    local n = count()
    local share = math.min(math.max((n - later) / math.max(capacity, 1), 1 - since / (whole + part / events)), 1)
    if share > 0 then
      -- The rest is in parts of the old rate: it is rounded up.
      tat, rest, left = math.min(last, most), 0, math.min(last, most) - now
      back, changed = cost * share, true
      if n - back > n * exactness then
        tat = tat - math.min(math.floor(whole * share), left - 1)
        mean(tat - now, n - back)
      else
        tat = now
      end
      back = math.floor(back)
    end
  end
  if changed and later == 0 then
    sum = math.max(sum - back, 0)
    if sum == 0 then
      -- What rounding has left is of no event.
      tat, rest = now, 0
    end
  end
elseif op == 'penalize' and penalty <= now then
  penalty, changed = cost, true
end
local bucket = struct.pack('<ddddddd', tat, rest, rate, busy, sum, span, penalty)
if changed then
  -- The bucket outlives what it says: expiry cleans up, a second later or more.
  last = math.max(rest > 0 and tat + 1 or tat, penalty)
  call('SET', key, bucket, 'PX', math.max(math.ceil((last - now) / 1000), 0) + 1001)
end
return struct.pack('<dd', now, spent) .. bucket, tail, cost, leaves, capacity, now + window
