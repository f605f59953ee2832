-- Record: keeps small values that processes share, each under a name.
-- KEYS[1]  hash: under each name its value, under the empty name how many bytes all take, and
--          under a line feed and the first line of names how many bytes those take
-- KEYS[2]  sorted set of the names, by the instants at which they are due; a name that is
--          not in it has no value
-- ARGV[1]  get, put or due
-- ARGV[2]  get, put: the name; due: the most records to tell of
-- ARGV[3]  put: the digest of the value that is replaced, or nothing if there is none;
--          due: how long the records are not due again, so that others leave them alone
-- put      ARGV[4] the value, or nothing to remove it; ARGV[5] how long until it is due;
--          ARGV[6] the most bytes that all may take; ARGV[7] how many times the room that is
--          left those with the first line of a new one may take
-- Reply    a word: DONE, CHANGED (put: another value is there) or FULL; now; and for each
--          record how long until it is due, the lengths of its name and value, each with a
--          space, the name and the value
-- Instants are milliseconds since the epoch, spans milliseconds.
local call, hash, due, op, name = redis.call, KEYS[1], KEYS[2], ARGV[1], ARGV[2]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- Both keys outlive every record, which is due within an hour.
local lifetime = 7200000
-- The longest time until a record is due. What is due later was put while the clock was ahead.
local longest = 3600000
-- What a record takes beside its name and value.
local overhead = 150

local function reply(word, records)
  return string.format('%s %.0f ', word, now) .. table.concat(records)
end

local function told(of, value, left)
  return string.format('%.0f %d %d ', left, #of, #value) .. of .. value
end

-- there returns what the name has.
local function there(value)
  if not value then
    return {}
  end
  local instant = call('ZMSCORE', due, name)[1]
  return { told(name, value, math.min((tonumber(instant) or now) - now, longest)) }
end

if op == 'due' then
  local records = {}
  local names = call('ZRANGE', due, '-inf', now, 'BYSCORE', 'LIMIT', 0, ARGV[2])
  if #names == 0 then
    names = call('ZRANGE', due, now + longest + 1, '+inf', 'BYSCORE', 'LIMIT', 0, ARGV[2])
  end
  for _, of in ipairs(names) do
    local value = call('HGET', hash, of)
    if value then
      call('ZADD', due, now + ARGV[3], of)
      records[#records + 1] = told(of, value, 0)
    else
      -- The hash was evicted by itself.
      call('ZREM', due, of)
    end
  end
  return reply('DONE', records)
end

if op == 'put' and call('ZCARD', due) == 0 then
  -- The set was evicted by itself: what the hash has would never be due.
  call('PEXPIRE', hash, 0)
end
local before = call('HGET', hash, name)
if op == 'get' then
  return reply('DONE', there(before))
end

local value = ARGV[4]
local version = before and redis.sha1hex(before) or ''
if version ~= ARGV[3] then
  return reply('CHANGED', there(before))
end
local share = name:match('^([^\n]*)\n')
share = share and '\n' .. share
local function size(text)
  return text and text ~= '' and #name + #text + overhead or 0
end

local function bytes(of)
  return tonumber(call('HGET', hash, of)) or 0
end

local function count(change)
  local all = call('HINCRBY', hash, '', change)
  if share then
    -- Programs that know no shares may have removed records: a share is at most all.
    local own = math.max(math.min(bytes(share) + change, all), 0)
    if own > 0 then
      call('HSET', hash, share, own)
    else
      call('HDEL', hash, share)
    end
  end
end

if not before and value ~= '' then
  local left = tonumber(ARGV[6]) - bytes('') - size(value)
  if left < 0 or share and bytes(share) + size(value) > left * ARGV[7] then
    return reply('FULL', {})
  end
end
if value == '' then
  if before then
    call('HDEL', hash, name)
    count(-size(before))
  end
  call('ZREM', due, name)
  return reply('DONE', {})
end
call('ZADD', due, now + ARGV[5], name)
call('HSET', hash, name, value)
count(size(value) - size(before))
call('PEXPIRE', hash, lifetime)
call('PEXPIRE', due, lifetime)
return reply('DONE', { told(name, value, tonumber(ARGV[5])) })
