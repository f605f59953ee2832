-- What the scripts of sorted sets share. A request has a member for each binary digit of
-- its cost that is 1, so that no cost makes a call take longer: for the digit that is
-- worth 2^k the ID, followed by k unless that is 0. Its score is the instant times
-- 2^(53k), which is exact: instants are at least 1, and below 2^52. So the members of
-- each digit are together, by instant.
local call, key = redis.call, KEYS[1]

-- Limits are at most 100000, so no decision depends on more than these events.
local most = 100001

-- The first score beyond those of the highest digit that costs have, up to 100000.
local beyondAll = 2 ^ (53 * 17)

-- The highest digit of the members whose scores can be.
local top = 0
do
  local last = tonumber(call('ZRANGE', key, -1, -1, 'WITHSCORES')[2] or 1)
  if last >= beyondAll then
    last = tonumber(call('ZRANGE', key, string.format('(%.17g', beyondAll), 1, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')[2] or 1)
  end
  local _, exponent = math.frexp(math.max(last, 1))
  top = math.floor((exponent - 1) / 53)
end

-- An instant after all others.
local never = math.huge

local function member(id, k)
  return k == 0 and id or id .. ':' .. k
end

-- Returns what the members after the instant and up to the latest that is believed cost,
-- and their number.
local function count(after, latest)
  local sum, number = 0, 0
  for k = 0, top do
    local n = call('ZCOUNT', key, string.format('(%.17g', math.max(after, 0.5) * 2 ^ (53 * k)), latest * 2 ^ (53 * k))
    sum, number = sum + n * 2 ^ k, number + n
  end
  return sum, number
end

-- Returns the instants of the newest member that is believed and of the newest one of
-- another request, or 0.
local function newest(id, latest)
  local first, other = 0, 0
  for k = 0, top do
    local unit = 2 ^ (53 * k)
    local last = call('ZRANGE', key, latest * unit, unit / 2, 'BYSCORE', 'REV', 'LIMIT', 0, 2, 'WITHSCORES')
    first = math.max(first, math.floor((tonumber(last[2]) or 0) / unit))
    -- A request has one member of a digit.
    other = math.max(other, math.floor((tonumber(last[last[1] == member(id, k) and 4 or 2]) or 0) / unit))
  end
  return first, other
end

-- Adds a request, or moves it.
local function put(id, cost, instant)
  local _, digits = math.frexp(cost)
  local added, others = {}, {}
  for k = 0, math.max(top, digits - 1) do
    if math.floor(cost / 2 ^ k) % 2 == 1 then
      added[#added + 1] = instant * 2 ^ (53 * k)
      added[#added + 1] = member(id, k)
    elseif k <= top then
      others[#others + 1] = member(id, k)
    end
  end
  call('ZADD', key, unpack(added))
  wrote = true
  if #others > 0 then
    call('ZREM', key, unpack(others))
  end
  top = math.max(top, digits - 1)
end

-- Makes a request cost less, or removes it. The bucket expires as after a charge.
local function drop(id, cost, window)
  local names, left, instant = {}, -cost, 0
  for k = 0, top do
    names[k + 1] = member(id, k)
  end
  if top > 0 then
    for i, score in ipairs(call('ZMSCORE', key, unpack(names))) do
      if score then
        left, instant = left + 2 ^ (i - 1), tonumber(score) / 2 ^ (53 * (i - 1))
      end
    end
  end
  if left > 0 then
    -- A bucket is not made that would never expire.
    assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
  end
  call('ZREM', key, unpack(names))
  wrote = true
  if left > 0 then
    put(id, left, instant)
    -- Without its last members the bucket is gone, and its expiry with it.
    call('PEXPIRE', key, math.ceil((window + grace) / 1000) + 1001)
  end
end

-- Removes members from one instant to another, no more than a thousand: other calls remove
-- the rest. Of those from 0 or up to never are also what no instant is.
local function trim(first, last)
  local left = 1000
  for k = 0, top do
    local unit = 2 ^ (53 * k)
    local from = first == 0 and k == 0 and '-inf' or string.format('%.17g', math.max(first, 0.5) * unit)
    local to = last < never and last * unit or k == top and '+inf' or string.format('(%.17g', 2 ^ (53 * (k + 1)))
    local n = math.min(call('ZCOUNT', key, from, to), left)
    if n > 0 then
      local rank = call('ZCOUNT', key, '-inf', '(' .. from)
      call('ZREMRANGEBYRANK', key, rank, rank + n - 1)
      wrote, left = true, left - n
    end
  end
end
