-- Dump: what a bucket holds, for another server to restore.
-- KEYS[1]  bucket
-- Reply    packed double: the instant at which the bucket expires, less than 0
--          if it never does or is not there; after it, the content as DUMP writes
--          it, or nothing if it is not there
-- The instant is milliseconds since the epoch.
local expiry, content = redis.call('PEXPIRETIME', KEYS[1]), redis.call('DUMP', KEYS[1])
return struct.pack('<d', expiry) .. (content or '')
