-- Held: follows the script of a bucket, and keeps beside the bucket what takes hold that may come back.
-- <KEYS[1]> held  sorted set of these takes, each as its number, a colon and its cost, by when it is held no
--                 more; in the slot of the bucket, and never a bucket's key, which has no space
-- ARGV[2]  packed doubles, after those of the script; without them, nothing is asked:
--          the number of the take, or of the one that a refund ends; 1 to hold nothing
--          the least that a take leaves without being held; refund: what it gives back
--          the longest that it is held
-- Reply    packed doubles, after those of the script: 1 if the take is held, and what is held, of which
--          100000 may be anything; two zeros for a take that leaves enough, about which nothing is looked up
local function hold(key, op, now, holds, number, longest)
  -- Most buckets hold nothing.
  if not holds and redis.call('ZCARD', key) == 0 then
    return 0, 0
  end
  local most, writes, own = 100, op == 'take' or op == 'refund', string.format('%.0f:', number)
  local sum, size, gone = 0, 0, {}
  local all = redis.call('ZRANGE', key, 0, most, 'WITHSCORES')
  for i = 1, #all, 2 do
    local member, last = all[i], tonumber(all[i + 1])
    local cost = tonumber(string.match(member, '^%d+:(%d+)$'))
    -- An earlier try may have taken it, and failed.
    local isOwn = writes and string.sub(member, 1, #own) == own
    if isOwn or not cost or last <= now or last > now + longest + grace then
      gone[#gone + 1] = member
    else
      sum, size = sum + cost, size + 1
    end
  end
  if writes and #gone > 0 then
    redis.call('ZREM', key, unpack(gone))
  end
  holds = holds and size < most
  if holds then
    -- A set is not made that would never expire.
    assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    local last, cost = math.min(ends or math.huge, now + longest), math.min(took, 100000)
    redis.call('ZADD', key, last, own .. string.format('%.0f', cost))
    redis.call('PEXPIRE', key, math.ceil((last - now) / 1000) + 1001)
    sum = sum + cost
  end
  return holds and 1 or 0, math.min(sum, 100000)
end
local function answer(KEYS, ARGV)
  took = 0
  local reply = run(KEYS, ARGV)
  if type(reply) ~= 'string' or #ARGV[2] < tail then
    return reply
  end
  local op, now, spent = ARGV[1], struct.unpack('<dd', reply)
  local number, least, longest = struct.unpack('<ddd', ARGV[2], tail)
  local takes = op == 'take' and spent == 1 and took > 0
  if takes and leaves >= least then
    return reply .. struct.pack('<dd', 0, 0)
  end
  if now == 0 then
    -- The script did without the clock.
    time = time or redis.call('TIME')
    now = time[1] * 1000000 + time[2]
  end
  local ok, isHeld, held = pcall(hold, KEYS[1] .. ' held', op, now, takes and number > 1, number, longest)
  if not ok and op == 'refund' and least == 0 then
    -- Nothing else was to be done, so it may be tried again.
    error(isHeld, 0)
  end
  -- What cannot be held is as good as charged, and what others hold is unknown then.
  return reply .. struct.pack('<dd', ok and isHeld or 0, ok and held or 100000)
end
