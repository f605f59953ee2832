-- Dump: what a bucket holds, for another server to restore. It is read value by value,
-- because servers refuse what others have written by DUMP.
-- KEYS[1]  bucket
-- ARGV[1]  its type: hash, string or zset
-- Reply    packed double: the instant at which the bucket expires, less than 0
--          if it never does or is not there; after it, the texts that it consists
--          of, each after a packed double of its length: fields and values, members
--          and scores, or the string. There are none if it is not there.
-- The instant is milliseconds since the epoch.
local call, key, kind = redis.call, KEYS[1], ARGV[1]
local parts, texts = {struct.pack('<d', call('PEXPIRETIME', key))}, {}
if kind == 'hash' then
  texts = call('HGETALL', key)
elseif kind == 'zset' then
  texts = call('ZRANGE', key, 0, -1, 'WITHSCORES')
else
  texts[1] = call('GET', key) or nil
end
for _, text in ipairs(texts) do
  parts[#parts + 1] = struct.pack('<d', #text)
  parts[#parts + 1] = text
end
return table.concat(parts)
