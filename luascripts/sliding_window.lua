-- Sliding window: two counters, of which the older is weighted by overlap.
-- KEYS[1]  bucket: string of five packed doubles, the current window's start,
--          what was spent in it and in the one before it, end of the penalty,
--          when something was spent in it that had been empty
-- ARGV[1]  charge, take, refund or penalize; check and peek write nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock
--          window
--          cost; penalize: the end of the penalty
--          take: capacity; refund: the start of the window it was spent in
--          the length of the parts that weigh the window before
--          how long a penalty lasts at most
--          refund: when the bucket was made in which it was spent; charge: when what
--          is late stops counting, less than 0 for minus the time that is left, or 0
-- Reply    packed doubles: now, 1 if the cost was spent, start, current,
--          previous, end of the penalty, when the bucket was made
-- Instants are microseconds since the epoch, spans are microseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local now, window, cost, bound, unit, lasts, identity, tail = struct.unpack('<ddddddd', ARGV[2])
if now == 0 then
  time = time or call('TIME')
  now = time[1] * 1000000 + time[2]
end
local start, current, previous, penalty, born = 0, 0, 0, 0, 0
local stored = call('GET', key)
if stored then
  if #stored ~= 40 then
    return redis.error_reply('WRONGTYPE the key holds something else than a sliding window')
  end
  start, current, previous, penalty, born = struct.unpack('<ddddd', stored)
  -- Of a bucket whose window cannot be, nothing is believed.
  if not sound(start, current, previous, penalty, born) or start - now > grace then
    start, current, previous, penalty, born = 0, 0, 0, 0, 0
  elseif penalty - now > lasts + grace then
    penalty = 0
  end
end

local begin = now - math.fmod(now, window)
if begin > start then
  previous = begin == start + window and current or 0
  start, current = begin, 0
end

local function save()
  -- The bucket outlives what it says: expiry cleans up, a second later or more.
  local last = math.max(start + 2 * window, penalty)
  call('SET', key, struct.pack('<ddddd', start, current, previous, penalty, born),
    'PX', math.ceil((last - now) / 1000) + 1001)
end

local function spend()
  if cost > 0 then
    born = current == 0 and previous == 0 and now or born
    -- The count stops at 2^53-1, the last integer a double holds exactly.
    current = math.min(current + cost, 9007199254740991)
    save()
  end
  return 1
end

local spent, leaves = 0, nil
if op == 'charge' then
  local ends = identity < 0 and now - identity or identity
  local settled = math.min(ends, now + 2 * window) - 2 * window
  settled = settled - math.fmod(settled, window)
  if identity == 0 or ends > now and settled >= start then
    spent = spend()
  else
    spent = 1
    if cost > 0 and ends > now and settled == start - window then
      born = current == 0 and previous == 0 and now or born
      previous = math.min(previous + cost, 9007199254740991)
      save()
    end
  end
elseif op == 'take' then
  local left = math.min(start + window - now, window)
  -- The product is below 2^52, so the quotient is exact enough to round up.
  local weighted = math.ceil(math.min(previous, 4294967295) * math.ceil(left / unit) / math.ceil(window / unit))
  -- A sum stops where counts do.
  if penalty <= now and (cost == 0 or math.min(current + weighted, 9007199254740991) + cost <= bound) then
    spent = spend()
    leaves = bound - math.min(current + weighted, 9007199254740991)
  end
elseif op == 'refund' then
  if cost == 0 or born ~= identity then
    -- Nothing to give back.
  elseif bound == start and current > 0 then
    current = math.max(current - cost, 0)
    save()
  elseif bound == start - window and previous > 0 then
    previous = math.max(previous - cost, 0)
    save()
  end
elseif op == 'penalize' and penalty <= now then
  penalty = cost
  save()
end
return struct.pack('<ddddddd', now, spent, start, current, previous, penalty, current + previous > 0 and born or 0),
  tail, cost, leaves, bound, now + window
