-- Override: keeps what operators have changed for single clients.
-- KEYS[1]  hash: v = a text that changes with each write, and under the name of each
--          override the packed instant at which it ends, and its content
-- ARGV[1]  read, set, keep (set, unless there is one of that name) or remove
-- ARGV[2]  all but read: the name
-- ARGV[3]  set and keep: packed doubles, how long it lasts, and how many there may be
-- ARGV[4]  set and keep: the content, without line ends
-- Reply    read: v, and a line of each that has not ended: how long it still lasts, a
--          space and the content or, of what has no instant, an exclamation mark and
--          the name; set and keep: SET, or FULL; remove: REMOVED, or NONE if there was
--          none
-- Instants are milliseconds since the epoch, spans milliseconds.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, live, damaged, last = call('HGETALL', key), {}, {}, 0
for i = 1, #all, 2 do
  if all[i] ~= 'v' then
    local ends = #all[i + 1] >= 8 and struct.unpack('<d', all[i + 1])
    -- 2^53 is beyond what a double counts exactly, and so is no instant of ours.
    if not ends or ends ~= ends or ends > 9007199254740992 then
      damaged[all[i]] = true
    elseif ends > now then
      live[all[i]], last = ends, math.max(last, ends)
    elseif op ~= 'read' then
      call('HDEL', key, all[i])
    end
  end
end
if op == 'read' then
  local lines = { call('HGET', key, 'v') or 'none' }
  for i = 1, #all, 2 do
    if live[all[i]] then
      lines[#lines + 1] = string.format('%.0f ', live[all[i]] - now) .. string.sub(all[i + 1], 9)
    elseif damaged[all[i]] then
      lines[#lines + 1] = '!' .. all[i]
    end
  end
  return table.concat(lines, '\n')
end

local name, removed = ARGV[2], nil
if op == 'keep' and live[name] then
  return 'SET'
end
if op == 'remove' then
  removed = (live[name] or damaged[name]) and 'REMOVED' or 'NONE'
  call('HDEL', key, name)
  live[name], damaged[name] = nil, nil
else
  local lasts, most = struct.unpack('<dd', ARGV[3])
  local count = live[name] and 0 or 1
  for _ in pairs(live) do
    count = count + 1
  end
  if count > most then
    return 'FULL'
  end
  call('HSET', key, name, struct.pack('<d', now + lasts) .. ARGV[4])
  last = math.max(last, now + lasts)
end
if op ~= 'remove' or next(live) or next(damaged) then
  call('HSET', key, 'v', time[1] .. '.' .. time[2])
end
if op ~= 'remove' or next(live) then
  -- The hash outlives what it says: expiry cleans up, a second later.
  call('PEXPIREAT', key, string.format('%.0f', last + 1001))
elseif not next(damaged) then
  call('DEL', key)
end
return removed or 'SET'
