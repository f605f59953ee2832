-- Fixed window: counts in the window that is open, and opens one where none is.
-- KEYS[1]  bucket: hash with c = count, r = reset, b = when the window was opened, if its end was given or on the clock,
--          and, once there was one, p = end of the penalty. A plain charge of a bucket that had vanished
--          leaves c alone, and no expiry: an orphan, which counts in the window
--          that opens next. A plain opening of a window writes r, and an expiry
--          if there is none.
-- ARGV[1]  check, charge, take, refund or penalize; peek, which writes nothing
-- ARGV[2]  packed doubles:
--          now, or 0 for this server's clock; or, less than 0, the negative of
--          an instant that this clock has passed
--          window
--          cost; penalize: the end of the penalty
--          take: capacity; refund: the reset of the window it was spent in
--          0; 1 if windows begin at multiples of their length; or, of a calendar,
--          the end of a window, after which one of that length follows
--          the longest that a window lasts
--          how long a penalty lasts at most
--          refund: when the window was opened in which it was spent, or 0; else
--          when what is late stops counting, less than 0 for minus the time that
--          is left, or 0
-- Reply    packed doubles: now, 1 if the cost was spent, count, reset, end of
--          the penalty, when it was opened or 0; now is 0 if it was not needed
-- Instants are microseconds since the epoch, spans are microseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local now, window, cost, bound, align, longest, lasts, identity, tail = struct.unpack('<dddddddd', ARGV[2])
local b = op == 'charge' and call('HMGET', key, 'r', 'p', 'b') or call('HMGET', key, 'r', 'p', 'b', 'c')
local reset, penalty, born, count = number(b[1]), number(b[2]), number(b[3]), number(b[4])
local isSound = sound(count, reset, penalty, born)

-- Without the end of a window a bucket is ours if one of its fields is a number of ours and it has
-- no others. Another program's data under this key stays what it is.
if reset <= 0 and (not isSound or penalty == 0 and (count > 0 or call('EXISTS', key) == 1)) then
  local own, isOurs = 0, false
  for _, text in ipairs({ 'c', 'r', 'p', 'b' }) do
    text = call('HGET', key, text)
    own, isOurs = own + (text and 1 or 0), isOurs or text and sound(number(text), 0, 0)
  end
  -- A user may lack HLEN.
  local fields = redis.pcall('HLEN', key)
  if not isOurs or type(fields) == 'number' and fields > own then
    return redis.error_reply('WRONGTYPE the key holds something else than a fixed window')
  end
end

-- A window that ends more than five seconds after the instant that has passed is
-- taken for open without reading the clock, which is a fifth of the work. They are
-- for a server that was stopped while the command waited in it.
local open = now < 0 and identity <= 0 and isSound and penalty == 0 and reset + now > 5000000 and reset + now <= longest + grace
local disbelieved = false
if open then
  now = 0
else
  if now <= 0 then
    time = time or call('TIME')
    now = time[1] * 1000000 + time[2]
  end
  -- Of a bucket whose window cannot be, nothing is believed.
  local known = isSound and reset - now <= longest + grace
  open = reset > now and known
  if not known or penalty - now > lasts + grace then
    penalty, disbelieved = 0, true
  end
  if disbelieved and op ~= 'peek' then
    if op == 'charge' then
      count = number(call('HGET', key, 'c'))
    end
    -- Where what follows cannot give a window to the count, its penalty stays, because it
    -- shows that the bucket is ours.
    assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    -- What is not believed says nothing, so this changes nothing of what the bucket says.
    -- A window that is over is left, or made, because a bucket of ours has one.
    if known and (reset > 0 or count > 0) then
      call('HSET', key, 'p', 0)
    else
      count, reset, born = 0, 1, 0
      call('HSET', key, 'c', count, 'r', reset, 'p', 0, 'b', born)
    end
  elseif not isSound then
    count, reset, born = 0, 0, 0
  end
end

-- Most calls end here, before the functions below are made, which they do not
-- need. Redis makes a text of each number that it is called with, which costs it
-- a twentieth of the whole, and most costs are 1.
local amount = cost == 1 and '1' or cost
local counts = op == 'charge' and (identity <= 0 or identity > now) or op == 'take' and penalty <= now
if open and counts then
  if op == 'take' and cost > 0 and count + cost > bound then
    return struct.pack('<dddddd', now, 0, count, reset, penalty, born), tail, cost
  end
  count = redis.pcall('HINCRBY', key, 'c', amount)
  local isNone = type(count) == 'table' and (string.find(count.err, 'not an integer') or string.find(count.err, 'overflow'))
  -- Beyond 2^53 doubles are up to 2 off.
  if isNone or type(count) == 'number' and (count < cost or count - cost > 9007199254740994) then
    -- Nothing of the bucket is believed, whose window is over then.
    assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    call('HSET', key, 'c', 0, 'r', 1, 'p', 0, 'b', 0)
    return run(KEYS, ARGV)
  elseif type(count) == 'table' then
    return count
  end
  -- The count stops at 2^53-1, the last integer a double holds exactly.
  if count > 9007199254740991 then
    count, wrote = 9007199254740991, true
    call('HSET', key, 'c', count)
  end
  return struct.pack('<dddddd', now, 1, count, reset, penalty, born), tail, cost, bound - count, bound, reset
end

-- The bucket outlives what it says: expiry cleans up, a second later or more.
local function lifetime(last)
  return math.ceil((last - now) / 1000) + 1001
end

if op == 'charge' then
  count = number(call('HGET', key, 'c'))
  if not sound(count, 0, 0) then
    count = 0
  end
end
local orphaned = reset == 0 and count or 0
local late = identity < 0 and now - identity or identity

local function begin(spent)
  count, reset = math.min(orphaned + spent, 9007199254740991), now + window
  if align == 0 and op ~= 'refund' and late > now then
    -- The end of an aligned window is known better than the time that is left.
    reset = math.min(late, reset)
  elseif align == 1 then
    reset = reset - math.fmod(now, window)
  elseif align > 1 then
    local after = math.floor((now - align) / window) + 1
    -- A caller whose clock is that wrong cannot say when the window ends.
    reset = align + window * (align - now > longest + grace and after or math.max(after, 0))
  end
  -- A bucket is not made that would never expire.
  assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
  -- Other windows are told apart by their ends.
  local last = born
  born = (align ~= 0 or op ~= 'refund' and late > now) and now or 0
  if born == last then
    call('HSET', key, 'c', count, 'r', reset)
  else
    call('HSET', key, 'c', count, 'r', reset, 'b', born)
  end
  wrote = true
  call('PEXPIRE', key, lifetime(math.max(reset, penalty)))
end

local spent = 0
if op == 'charge' then
  spent = 1
  -- A late charge that is over counts in no window, and opens none.
  if not open and (identity == 0 or late > now) then
    begin(cost)
  elseif orphaned > 0 and cost == 0 then
    -- What repairs it knows that its window is over.
    orphaned = 0
    begin(0)
  end
elseif op == 'take' and penalty <= now then
  spent = (cost == 0 or orphaned + cost <= bound) and 1 or 0
  begin(cost * spent)
elseif op == 'check' and not open and penalty <= now and (align == 0 or orphaned > 0) then
  begin(0)
elseif op == 'refund' then
  if orphaned > 0 then
    begin(0)
  end
  local back = math.min(cost, count)
  if back > 0 and reset == bound and born == identity then
    count = call('HINCRBY', key, 'c', -back)
  end
elseif op == 'penalize' and penalty <= now then
  penalty = cost
  -- A bucket that is not of an aligned window is none without one, because what opens
  -- one without a script does not look at the penalty first.
  if not open and align == 0 or orphaned > 0 then
    begin(0)
  end
  local short = call('PTTL', key) < lifetime(penalty)
  assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
  call('HSET', key, 'p', penalty)
  wrote = true
  if short then
    call('PEXPIRE', key, lifetime(penalty))
  end
end
return struct.pack('<dddddd', now, spent, count, reset, penalty, born), tail, cost, spent == 1 and bound - count, bound, reset
