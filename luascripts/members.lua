-- What the scripts of sorted sets share. A request has a member for each binary digit of
-- its cost that is 1, so that no cost makes a call take longer: for the digit that is
-- worth 2^k the ID, followed by k unless that is 0. Its score is the instant times
-- 2^(53k), which is exact: instants are at least 1, and below 2^52. So the members of
-- each digit are together, by instant.
local call, key = redis.call, KEYS[1]

-- The highest digit of the members.
local top = 0
do
  local last = call('ZRANGE', key, -1, -1, 'WITHSCORES')[2]
  if last then
    local _, exponent = math.frexp(tonumber(last))
    top = math.floor((exponent - 1) / 53)
  end
end

-- Limits are at most 100000, so no decision depends on more than these events.
local most = 100001

local function member(id, k)
  return k == 0 and id or id .. ':' .. k
end

-- Returns what the members after the instant cost, and their number.
local function count(after)
  local sum, number = 0, 0
  for k = 0, top do
    local n = call('ZCOUNT', key, string.format('(%.17g', math.max(after, 0.5) * 2 ^ (53 * k)), 2 ^ (53 * k + 52))
    sum, number = sum + n * 2 ^ k, number + n
  end
  return sum, number
end

-- Returns the instants of the newest member and of the newest one of another request,
-- or 0.
local function newest(id)
  local first, other = 0, 0
  for k = 0, top do
    local unit = 2 ^ (53 * k)
    local last = call('ZRANGE', key, unit * 2 ^ 52, unit / 2, 'BYSCORE', 'REV', 'LIMIT', 0, 2, 'WITHSCORES')
    first = math.max(first, (tonumber(last[2]) or 0) / unit)
    -- A request has one member of a digit.
    other = math.max(other, (tonumber(last[last[1] == member(id, k) and 4 or 2]) or 0) / unit)
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

-- Makes a request cost less, or removes it.
local function drop(id, cost)
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
  call('ZREM', key, unpack(names))
  wrote = true
  if left > 0 then
    put(id, left, instant)
  end
end

-- Removes members up to the instant, no more than a thousand: other calls remove the
-- rest.
local function trim(last)
  local left = 1000
  for k = 0, top do
    local unit = 2 ^ (53 * k)
    local n = math.min(call('ZCOUNT', key, unit / 2, last * unit), left)
    if n > 0 then
      local first = k == 0 and 0 or call('ZCOUNT', key, '-inf', unit / 2)
      call('ZREMRANGEBYRANK', key, first, first + n - 1)
      wrote, left = true, left - n
    end
  end
end

