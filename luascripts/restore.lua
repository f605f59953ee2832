-- Restore: makes a bucket of what another server dumped, unless it is there, or
-- a mark says that it was or is not to be.
-- KEYS[1]  bucket
-- KEYS[2]  mark, a string of nothing; may be left out
-- ARGV[1]  packed doubles:
--          the instant at which the bucket expires
--          1 if it is to be marked until then, or 0
--          the end of the window that a count without one gets, or 0
-- ARGV[2]  its type: hash, string or zset
-- ARGV[3]  its texts, as the dump has them
-- Reply    RESTORED or KEPT
-- The first instant is milliseconds since the epoch, the other one microseconds.
local call, key, mark, kind, dumped = redis.call, KEYS[1], KEYS[2], ARGV[2], ARGV[3]
local expiry, marks, reset = struct.unpack('<ddd', ARGV[1])
if mark and call('EXISTS', mark) == 1 then
  return 'KEPT'
end
local instant, reply = string.format('%.0f', expiry), 'KEPT'
if call('EXISTS', key) == 0 then
  -- A bucket is not made that would never expire.
  assert(redis.acl_check_cmd('PEXPIREAT', key, instant), 'NOPERM the user may not run pexpireat')
  local texts, at = {}, 1
  while at <= #dumped do
    local first, length = at + 8, struct.unpack('<d', dumped, at)
    assert(length >= 0 and first + length - 1 <= #dumped, 'the dump is damaged')
    at = first + length
    texts[#texts + 1] = string.sub(dumped, first, at - 1)
  end
  if kind == 'string' then
    call('SET', key, texts[1])
  elseif kind == 'hash' then
    call('HSET', key, unpack(texts))
    if reset > 0 and call('HGET', key, 'c') then
      call('HSETNX', key, 'r', reset)
    end
  else
    -- A score comes before its member, and a call takes only so many words.
    for i = 1, #texts, 2 do
      texts[i], texts[i + 1] = texts[i + 1], texts[i]
    end
    for i = 1, #texts, 1000 do
      call('ZADD', key, unpack(texts, i, math.min(i + 999, #texts)))
    end
  end
  call('PEXPIREAT', key, instant)
  reply = 'RESTORED'
end
if mark and marks > 0 then
  call('SET', mark, '', 'PXAT', instant)
end
return reply
