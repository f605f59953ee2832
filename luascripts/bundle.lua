-- Bundle: the end of a script that is run for several buckets in one call.
-- KEYS     the buckets
-- ARGV[1]  what is done to each of them, as for one
-- ARGV[2]  the numbers, the same for all
-- ARGV[3]  if it is there, ARGV[2] has the numbers for each, one after the other,
--          as many for all
-- Reply    the replies for each, one after the other, as long for all; or, if
--          there is an error among them, a list of them
local key, arguments, replies, failed = {}, { ARGV[1] }, {}, false
local each, size, sub, pcall = ARGV[3], #ARGV[2] / #KEYS, string.sub, pcall
for i = 1, #KEYS do
  key[1], arguments[2], wrote = KEYS[i], each and sub(ARGV[2], (i - 1) * size + 1, i * size) or ARGV[2], false
  -- What is wrong with one bucket is no matter of the others. Among other replies
  -- go-redis stops reading at an error that begins with a word for which it has a
  -- type, such as READONLY; for those of the guard it has none.
  local KEYS, ARGV = key, arguments
  local ok, reply, tail, cost, leaves, capacity, ends = pcall(run, KEYS, ARGV)
  -- include held
  if not ok or type(reply) == 'table' then
    reply, failed = failure(reply), true
  end
  replies[i] = reply
end
return failed and replies or table.concat(replies)
