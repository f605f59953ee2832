-- Override: keeps what operators have changed for clients and zones, alike on every shard.
-- KEYS[1]  hash: under the name of each override packed doubles, its version, when it ends
--          and until when it is remembered, and its content, or none if it was removed; and
--          d = the sum of the digests of all; v = the number of the last change; x = the
--          latest instant until which one is remembered; s = when a process was last in
--          touch, by that process's clock, and o = that by this server's
-- KEYS[2]  sorted set of changes, by their numbers: version, instant, name, what the writer
--          says of it, the content before and the content after, in lines; and - at the last
--          one that is not told
-- ARGV[1]  page, changes, change, part, log, sum or seen
-- ARGV[2]  page: the cursor, 0 at first; changes: a number; change, part: how many fields the hash
--          may have; sum: the d that is to be replaced; seen: now by the caller's clock
-- ARGV[3]  sum: the v of the reading; seen: the latest s of other shards
-- ARGV[4]  sum: the new d, unless something has changed; seen: the s for which all here is out
--          of date, and goes, or -1
-- log, from ARGV[2] on: members of the set on another server, which are added
-- part is a change of which more follow; v moves with the last one, which is a change
-- change, from ARGV[3] on, for each of several overrides:
--          name; what the caller knows of it, which is kept if it is later than what is
--          here: packed doubles, version, how long it lasts and how long it is remembered, or
--          nothing if it knows nothing; its content; a member of the set that says so, or
--          nothing;
--          and to decide about a change: a packed double, how long it lasts; the content,
--          without line ends, or nothing, which lasts 0, to remove it; the digest of the
--          override that it replaces, 0 if it replaces none, or nothing if that does not
--          matter; what the writer says of it. The four are empty if there is nothing to decide
-- Reply    frames: a word, the lengths of two texts, each with a space, the texts, which
--          may have any bytes, and a line end.
--          page: the next cursor, now and v, and a frame for each name and its value;
--          changes: 0, now and v, and a frame for each change since that number and the value
--          of its name now, or LOST if the changes are not known; change: for each, SET or
--          REMOVED, with version, now, end and until when it is remembered, and the member of
--          the set; SAME (it was set before), with the same numbers; NONE; CHANGED, with the
--          content before; FULL; or, if there was nothing to decide, HAS, or OVER if it need not
--          be remembered here; seen: the size of the set; else DONE.
-- Of two versions the later one counts, everywhere. A removed override, and one that has run
-- out, are remembered as long as an earlier version could last, wherever that may be. Each server
-- ends them by its own clock, so servers are told spans.
-- Instants are milliseconds since the epoch, spans milliseconds. Versions and numbers grow,
-- and are about the microseconds since the epoch.
local call, hash, log, op = redis.call, KEYS[1], KEYS[2], ARGV[1]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local micros = time[1] * 1000000 + time[2]
-- 2^53 - 1, about the year 287396: no end.
local endless = 9007199254740991
-- 2^52, in microseconds about the year 2112: larger numbers are somebody else's.
local highest = 4503599627370496
-- September 2001.
local earliest = 1000000000000
-- A shard that is away for 90 days is not believed: a day more for clocks, and for s.
local day, quarter = 86400000, 7862400000
-- By how much clocks may differ that are taken for the same, and how much longer than it is
-- here a version has to be remembered to be written for that.
local near, minute = 5000, 60000
local own = { d = true, v = true, x = true, s = true, o = true }

local function isWhole(number, least, most)
  return number and number >= least and number <= most and number % 1 == 0
end

local function stored(field, most)
  local number = tonumber(call('HGET', hash, field) or nil)
  return isWhole(number, 0, most) and number or nil
end

local function frame(word, first, second)
  return string.format('%s %d %d ', word, #first, #second) .. first .. second .. '\n'
end

local function text(number)
  return string.format('%.0f', number)
end

if op == 'page' then
  -- A user may lack HSCAN, which spares the server a long reply.
  local found = redis.pcall('HSCAN', hash, ARGV[2], 'COUNT', 1000)
  if found.err then
    found = { '0', call('HGETALL', hash) }
  end
  local frames = { frame(found[1], text(now), call('HGET', hash, 'v') or '') }
  for i = 1, #found[2], 2 do
    if not own[found[2][i]] then
      frames[#frames + 1] = frame('=', found[2][i], found[2][i + 1])
    end
  end
  return table.concat(frames)
end

if op == 'changes' then
  local later = call('ZRANGE', log, ARGV[2], '+inf', 'BYSCORE', 'WITHSCORES')
  if tonumber(later[2] or nil) ~= tonumber(ARGV[2]) then
    return 'LOST'
  end
  local frames = { frame('0', text(now), call('HGET', hash, 'v') or '') }
  for i = 3, #later, 2 do
    if later[i] == '-' then
      return 'LOST'
    end
    local name = string.match(later[i], '^[^\n]*\n[^\n]*\n([^\n]*)')
    frames[#frames + 1] = name and frame('=', later[i], call('HGET', hash, name) or '') or ''
  end
  return table.concat(frames)
end

-- bound keeps the last changes. The log outlives what it says for a year.
local function bound()
  call('ZREMRANGEBYRANK', log, 0, -1001)
  call('PEXPIRE', log, 31536000000)
end

if op == 'log' then
  for i = 2, #ARGV do
    -- By a clock that is ahead they would be the latest for long.
    local at = tonumber(string.match(ARGV[i], '^[^\n]*\n(%d+)\n') or nil)
    if at then
      call('ZADD', log, text(math.min(at * 1000, micros)), ARGV[i])
    end
  end
  bound()
  return 'DONE'
elseif op == 'sum' then
  if (stored('d', highest) or 0) == tonumber(ARGV[2]) and (stored('v', highest) or 0) == tonumber(ARGV[3]) then
    call('HSET', hash, 'd', ARGV[4])
  end
  return 'DONE'
elseif op == 'seen' then
  local known, told = math.max(stored('s', now + quarter) or 0, tonumber(ARGV[3])), tonumber(ARGV[2])
  -- If it was in touch by its own clock, that of a caller is wrong.
  if call('HGET', hash, 's') == ARGV[4] and now - (stored('o', endless) or 0) > quarter - day then
    call('PEXPIRE', hash, 0)
  elseif call('EXISTS', hash) == 1 then
    -- A caller whose clock is ahead would have the others doubted.
    local isBelieved = told <= math.max(now, known) + 3 * day
    call('HSET', hash, 's', text(isBelieved and math.max(known, told) or known), 'o', text(now))
  end
  return text(call('ZCARD', log))
end

-- Before that, no instant of this script is believed.
if now < earliest then
  return redis.error_reply("ERR this server's clock is before 2001")
end
local sum, number = stored('d', highest) or 0, math.max(micros, (stored('v', highest) or 0) + 1)
-- In a hash that has others, how long these are remembered is not known.
local latest = stored('x', endless) or call('EXISTS', hash) == 1 and endless or 0
-- A user may lack HLEN.
local size = redis.pcall('HLEN', hash)
local free = tonumber(ARGV[2]) - (type(size) == 'number' and size or 0)
local logged, isUntold, isChanged

-- override parses a value, or returns nil if another program wrote it.
local function override(name, value)
  if #value < 24 then
    return nil
  end
  local version, till, keep = struct.unpack('<ddd', value)
  if not (isWhole(version, 1, highest) and isWhole(till, 0, endless) and isWhole(keep, earliest, endless)) then
    return nil
  end
  local content = string.sub(value, 25)
  local id = redis.sha1hex(name .. '\n' .. string.sub(value, 1, 8) .. content)
  return { value = value, version = version, till = till, keep = keep, content = content, id = id, digest = tonumber(string.sub(id, 1, 13), 16) }
end

local function packed(name, version, till, keep, content)
  return override(name, struct.pack('<ddd', version, till, keep) .. content)
end

local function hasNoEnd(o)
  return o.content ~= '' and o.till == endless
end

-- horizon returns until when a later version has to be remembered.
local function horizon(o)
  return hasNoEnd(o) and math.max(o.keep, now + quarter) or o.keep
end

local function isLater(a, b)
  return not b or a.version > b.version or a.version == b.version and a.digest > b.digest
end

-- write puts an override in the place of another one.
local function write(name, o, old)
  sum = (sum - (old and old.digest or 0) + (o and o.digest or 0)) % highest
  isChanged = true
  if not o then
    call('HDEL', hash, name)
    return
  end
  call('HSET', hash, name, o.value)
  latest = math.max(latest, hasNoEnd(o) and endless or o.keep)
end

local function note(entry)
  call('ZADD', log, text(number), entry)
  number, logged = number + 1, number
end

-- numbers returns the numbers of an override for the reply.
local function numbers(o)
  return table.concat({ text(o.version), text(now), text(o.till), text(o.keep) }, ' ')
end

-- decide makes a change, and returns the reply.
local function decide(i, name, old, isDamaged)
  local lasts, content, expected, meta = struct.unpack('<d', ARGV[i + 4]), ARGV[i + 5], ARGV[i + 6], ARGV[i + 7]
  local before = old and old.content ~= '' and old.till > now and old.content or ''
  -- Near its end, the caller's clock may say that it is there, or gone.
  local isNear = old and old.content ~= '' and math.abs(old.till - now) < near and (expected == old.id or expected == '0')
  if content ~= '' and content == before then
    return frame('SAME', numbers(old), '')
  elseif expected ~= '' and expected ~= (before ~= '' and old.id or '0') and not isNear then
    return frame('CHANGED', '', before)
  elseif content == '' and before == '' and not isDamaged then
    return frame('NONE', '', '')
  end
  local till = math.min(now + lasts, endless)
  local keep = math.max(till < endless and not isDamaged and till or now + quarter, old and horizon(old) or 0)
  local o = packed(name, math.min(math.max(micros, old and old.version or 0) + 1, highest), till, keep, content)
  write(name, o, old)
  -- In JSON, a space means the same as a line end.
  local entry = table.concat({ text(o.version), text(now), name, meta, (string.gsub(before, '\n', ' ')), content }, '\n')
  note(entry)
  return frame(content == '' and 'REMOVED' or 'SET', numbers(o), entry)
end

-- take stores the caller's version if it is later. It returns the version that counts, and
-- whether it need not be remembered.
local function take(i, name, old)
  local version, lasts, keep = struct.unpack('<ddd', ARGV[i + 1])
  local told = packed(name, version, math.min(math.max(now + lasts, 0), endless), math.min(math.max(now + keep, earliest), endless), ARGV[i + 2])
  if not told or horizon(told) <= now then
    return old, true
  end
  local latest, other = told, old
  if not isLater(told, old) then
    latest, other = old, told
  end
  keep = latest.keep
  if other then
    keep = math.max(keep, other.id == latest.id and other.keep or horizon(other))
  end
  if latest == old and keep <= old.keep + minute then
    return old, false
  end
  latest = packed(name, latest.version, latest.till, keep, latest.content)
  write(name, latest, old)
  if other == old and ARGV[i + 3] ~= '' then
    note(ARGV[i + 3])
  else
    isUntold = true
  end
  return latest, false
end

local replies = {}
for i = 3, #ARGV, 8 do
  local name, isOver = ARGV[i], ARGV[i + 1] == ''
  local value = call('HGET', hash, name)
  local old = value and override(name, value) or nil
  local isDamaged = value and not old
  if old and horizon(old) <= now then
    write(name, nil, old)
    old, value, free = nil, nil, free + 1
  end
  if not value and free < 1 and ARGV[i + 1] .. ARGV[i + 5] ~= '' then
    replies[#replies + 1] = frame('FULL', '', '')
  else
    if ARGV[i + 1] ~= '' then
      old, isOver = take(i, name, old)
      isDamaged = isDamaged and not old
    end
    replies[#replies + 1] = ARGV[i + 4] == '' and frame(isOver and 'OVER' or 'HAS', '', '') or decide(i, name, old, isDamaged)
    free = value and free or free - 1
  end
end
if isChanged then
  if isUntold then
    note('-')
  end
  -- Processes drop ended overrides by themselves, so removing them does not move v.
  call('HSET', hash, 'd', text(sum), 'v', text(op ~= 'part' and logged or stored('v', highest) or number), 'x', text(latest))
  bound()
  -- Expiry removes the hash a second after its last override is forgotten.
  call('PEXPIREAT', hash, text(latest + 1001))
end
return table.concat(replies)
