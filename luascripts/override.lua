-- Override: keeps what operators have changed for clients and zones.
-- KEYS[1]  hash: v = the number of the last change; x = the latest end; p = where the
--          last clean-up ended; and under the name of each override the packed instant
--          at which it ends, and its content
-- KEYS[2]  sorted set of changes, by their numbers: number, instant, name, what the
--          writer says of it, the content before and the content after, in lines; and a
--          minus sign with the number of the last change that is not in the set
-- ARGV[1]  page, changes, change or log
-- ARGV[2]  page: the cursor, 0 at first; changes: a number; change: how many overrides
--          there may be; log: nothing
-- log, from ARGV[3] on: members of such a set on another server, which are added
-- change, from ARGV[3] on, for each of several changes: the name; a packed double, how
--          long it lasts, 0 without an end; the content, without line ends, or nothing
--          to remove it; the digest of the content that it replaces, 0 if it replaces
--          none, both with a space between if either will do, or nothing if that does not
--          matter; what the writer says of it, or nothing to leave it out of the set of
--          changes
-- Reply    frames: a word, the lengths of two texts, each with a space, the texts, which
--          may have any bytes, and a line end.
--          page: the next cursor and v, and a frame for each override; changes: 0 and v,
--          and a frame for each name that was changed since that number, or LOST if the
--          changes are not known; change: for each, SET, SAME (it was set before),
--          REMOVED, NONE, CHANGED or FULL, with SET for how long the content before would
--          have lasted, 0 without an end, and that content; log: DONE.
--          The frame of an override is how long it still lasts, its name and its content;
--          of one that is gone, a minus sign and the name; of what has no instant that is
--          one of ours, an exclamation mark and the name
-- Instants are milliseconds since the epoch, spans milliseconds. Numbers grow, and are
-- about the microseconds since the epoch, so that one is not used again after writes
-- were lost.
local call, hash, log, op = redis.call, KEYS[1], KEYS[2], ARGV[1]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
-- 2^53 - 1, about the year 287396: no end, and the most that a number may be.
local endless = 9007199254740991
-- September 2001.
local earliest = 1000000000000
local own = { v = true, x = true, p = true }
local unlogged = '-'

-- sound returns a number if it is one of ours, and nil otherwise: of larger ones, the next
-- is the same.
local function sound(text)
  local number = tonumber(text)
  return number and number >= 0 and number <= endless and number or nil
end

-- ends returns the instant at which a value ends; nil if it has none of ours: other bytes
-- read as one would end it.
local function ends(value)
  local instant = #value >= 8 and sound(struct.unpack('<d', value))
  return instant and instant >= earliest and instant % 1 == 0 and instant or nil
end

local function frame(word, first, second)
  return string.format('%s %d %d ', word, #first, #second) .. first .. second .. '\n'
end

local function told(name, value)
  local instant = value and ends(value)
  if value and not instant then
    return frame('!', name, '')
  elseif not value or instant <= now then
    return frame('-', name, '')
  end
  return frame(string.format('%.0f', instant - now), name, string.sub(value, 9))
end

-- scan returns the next cursor and some fields with their values. A user may lack HSCAN, which
-- spares the server a long reply.
local function scan(cursor, count)
  local found = redis.pcall('HSCAN', hash, cursor, 'COUNT', count)
  if found.err then
    return '0', call('HGETALL', hash)
  end
  return found[1], found[2]
end

-- 2^52, about the year 2112: larger numbers are somebody else's, and not believed, because soon the
-- next would be the same.
local highest = 4503599627370496
local most = string.format('%.0f', highest)

local function last()
  local found = call('ZRANGE', log, most, 0, 'BYSCORE', 'REV', 'LIMIT', 0, 1, 'WITHSCORES')
  return found[2] and tonumber(found[2]) or 0
end

if op == 'page' then
  local cursor, found = scan(ARGV[2], 1000)
  local frames = { frame(cursor, call('HGET', hash, 'v') or '', '') }
  for i = 1, #found, 2 do
    if not own[found[i]] then
      frames[#frames + 1] = told(found[i], found[i + 1])
    end
  end
  return table.concat(frames)
end

if op == 'changes' then
  local v, since = call('HGET', hash, 'v'), sound(ARGV[2])
  if not since then
    -- Somebody else has written it.
    return 'LOST'
  end
  local later = call('ZRANGE', log, ARGV[2], most, 'BYSCORE', 'WITHSCORES')
  if not later[2] or tonumber(later[2]) ~= since or sound(v) ~= last() then
    return 'LOST'
  end
  local frames, seen = { frame('0', v, '') }, {}
  for i = 3, #later, 2 do
    local name = string.match(later[i], '^[^\n]*\n[^\n]*\n([^\n]*)')
    if not name then
      -- It is unlogged, or somebody else has written it.
      return 'LOST'
    end
    if not seen[name] then
      seen[name] = true
      frames[#frames + 1] = told(name, call('HGET', hash, name))
    end
  end
  return table.concat(frames)
end

-- bound keeps the last changes. The log outlives what it says for a year.
local function bound()
  call('ZREMRANGEBYRANK', log, 0, -1001)
  call('PEXPIRE', log, 31536000000)
end

if op == 'log' then
  for i = 3, #ARGV do
    call('ZADD', log, string.match(ARGV[i], '^%d+'), ARGV[i])
  end
  bound()
  return 'DONE'
end

local room, replies, changed = tonumber(ARGV[2]), {}, false
local micros, v = time[1] * 1000000 + time[2], sound(call('HGET', hash, 'v')) or 0
if call('ZCOUNT', log, '(' .. most, '+inf') > 0 then
  -- Others of the future go too: after the highest the next would again not be believed.
  call('ZREMRANGEBYRANK', log, -call('ZCOUNT', log, string.format('(%.0f', micros), '+inf'), -1)
end
local number = math.max(micros, last() + 1, v <= highest and v + 1 or 0)
local latest = sound(call('HGET', hash, 'x'))
if not latest then
  -- In a hash that has others, how long these last is not known.
  local _, others = scan('0', 1)
  latest = others[1] and endless or 0
end

-- clean removes some overrides that have ended, and returns the next cursor and how many others
-- it has met.
local function clean(cursor, count)
  local after, found = scan(cursor, count)
  local live = 0
  for i = 1, #found, 2 do
    local instant = not own[found[i]] and ends(found[i + 1])
    if instant and instant <= now then
      call('HDEL', hash, found[i])
    elseif not own[found[i]] then
      live = live + 1
    end
  end
  return after, live
end

-- count returns how many overrides there are.
local function count()
  local cursor, live, all = '0', 0, 0
  repeat
    cursor, live = clean(cursor, 1000)
    all = all + live
  until cursor == '0'
  return all
end

-- known is how many there are, once they were counted, which takes long.
local known
local function isFull()
  if not known then
    local fields = redis.pcall('HLEN', hash)
    -- A user may lack HLEN, which spares the count.
    if type(fields) == 'number' and fields - 3 < room then
      return false
    end
    known = count()
  end
  return known >= room
end

local function note(name, meta, before, after)
  local text = string.format('%.0f', number)
  -- In JSON, a space means the same as a line end.
  local entry = { text, string.format('%.0f', now), name, meta, (string.gsub(before, '\n', ' ')), after }
  local isLogged = meta ~= '' and not string.find(name, '\n')
  call('ZADD', log, text, isLogged and table.concat(entry, '\n') or unlogged)
  number, changed = number + 1, text
end

for i = 3, #ARGV, 5 do
  local name, content, expected, meta = ARGV[i], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]
  local value = call('HGET', hash, name)
  local instant = value and ends(value)
  if instant and instant <= now then
    call('HDEL', hash, name)
    value = false
  end
  local before = instant and value and string.sub(value, 9) or ''
  local version = before ~= '' and redis.sha1hex(before) or '0'
  if content ~= '' and content == before then
    replies[#replies + 1] = frame('SAME', '', '')
  elseif expected ~= '' and not string.find(' ' .. expected .. ' ', ' ' .. version .. ' ', 1, true) then
    replies[#replies + 1] = frame('CHANGED', '', before)
  elseif content == '' then
    if value then
      call('HDEL', hash, name)
      note(name, meta, before, '')
      known = known and known - 1
    end
    replies[#replies + 1] = frame(value and 'REMOVED' or 'NONE', '', before)
  elseif not value and isFull() then
    replies[#replies + 1] = frame('FULL', '', '')
  else
    local lasts = struct.unpack('<d', ARGV[i + 1])
    local till = lasts > 0 and math.min(now + lasts, endless) or endless
    call('HSET', hash, name, struct.pack('<d', till) .. content)
    note(name, meta, before, content)
    latest, known = math.max(latest, till), known and (value and known or known + 1)
    local left = value and instant and instant < endless and instant - now or 0
    replies[#replies + 1] = frame('SET', string.format('%.0f', left), before)
  end
end
if changed then
  local cursor = clean(call('HGET', hash, 'p') or '0', 100)
  bound()
  call('HSET', hash, 'v', changed, 'x', string.format('%.0f', latest), 'p', cursor)
  local _, some = clean('0', 100)
  if some == 0 and count() == 0 then
    -- Without a field there is no hash.
    call('HDEL', hash, 'v', 'x', 'p')
  else
    -- The hash outlives what it says: expiry cleans up, a second later.
    call('PEXPIREAT', hash, string.format('%.0f', latest + 1001))
  end
end
return table.concat(replies)
