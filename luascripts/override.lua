-- Override: keeps what operators have changed for single clients.
-- KEYS[1]  hash: v = a text that changes with each write, and under the name of each
--          override the packed instant at which it ends, and its content
-- ARGV[1]  read, set, keep (set, unless there is one of that name) or remove
-- ARGV[2]  all but read: the name
-- ARGV[3]  set and keep: packed doubles, the instant at which it ends, and how many
--          there may be
-- ARGV[4]  set and keep: the content, without line ends
-- Reply    read: v and the contents of those that have not ended, each on a line; set
--          and keep: SET, or FULL; remove: REMOVED, or NONE if there was none
-- Instants are milliseconds since the epoch.
local call, key, op = redis.call, KEYS[1], ARGV[1]
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local all, live, last = call('HGETALL', key), {}, 0
for i = 1, #all, 2 do
  if all[i] ~= 'v' then
    local ends = struct.unpack('<d', all[i + 1])
    if ends > now then
      live[all[i]], last = all[i + 1], math.max(last, ends)
    elseif op ~= 'read' then
      call('HDEL', key, all[i])
    end
  end
end
if op == 'read' then
  local lines = { call('HGET', key, 'v') or 'none' }
  for _, content in pairs(live) do
    lines[#lines + 1] = string.sub(content, 9)
  end
  return table.concat(lines, '\n')
end

local name, removed = ARGV[2], nil
if op == 'keep' and live[name] then
  return 'SET'
end
if op == 'remove' then
  removed = live[name] and 'REMOVED' or 'NONE'
  call('HDEL', key, name)
  live[name] = nil
else
  local ends, most = struct.unpack('<dd', ARGV[3])
  local count = live[name] and 0 or 1
  for _ in pairs(live) do
    count = count + 1
  end
  if count > most then
    return 'FULL'
  end
  call('HSET', key, name, struct.pack('<d', ends) .. ARGV[4])
  last = math.max(last, ends)
end
if op ~= 'remove' or next(live) then
  call('HSET', key, 'v', time[1] .. '.' .. time[2])
  -- The hash outlives what it says: expiry cleans up, a second later.
  call('PEXPIREAT', key, string.format('%.0f', last + 1001))
else
  call('DEL', key)
end
return removed or 'SET'
