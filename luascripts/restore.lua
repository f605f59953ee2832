-- Restore: makes a bucket of what another server dumped, unless it is there, or
-- a mark says that it was or is not to be.
-- KEYS[1]  bucket
-- KEYS[2]  mark, a string of nothing; may be left out
-- ARGV[1]  packed doubles:
--          the instant at which the bucket expires
--          1 if it is to be marked until then, or 0
-- ARGV[2]  content as DUMP writes it
-- Reply    RESTORED or KEPT
-- The instant is milliseconds since the epoch.
local call, key, mark = redis.call, KEYS[1], KEYS[2]
local expiry, marks = struct.unpack('<dd', ARGV[1])
if mark and call('EXISTS', mark) == 1 then
  return 'KEPT'
end
local instant, reply = string.format('%.0f', expiry), 'KEPT'
if call('EXISTS', key) == 0 then
  call('RESTORE', key, instant, ARGV[2], 'ABSTTL')
  reply = 'RESTORED'
end
if mark and marks > 0 then
  call('SET', mark, '', 'PXAT', instant)
end
return reply
