-- Held: follows the script of a bucket, and keeps beside the bucket what takes hold that may come back.
-- <KEYS[1]> held  sorted set of these takes, as members.lua says, by when they count no more; in the
--                 slot of the bucket, and never a bucket's key, which has no space
-- ARGV[2]  packed doubles, after those of the script; without them, nothing is asked:
--          the number of the take, or of the one that a refund ends; 1 to hold nothing, or 0
--          the least that a take leaves without being held
--          the longest that it is held
-- Reply    packed doubles, after those of the script: 1 if the take is held, and what is held
local function hold(key, op, now, spent, number, least, longest)
  local holds = op == 'take' and spent == 1 and number > 1 and took > 0 and leaves < least
  local size = redis.call('ZCARD', key)
  -- Most buckets hold nothing.
  if size == 0 and not holds then
    return 0, 0
  end
  local count, put, drop, trim = members({ key })
  local latest = now + longest + grace
  if (op == 'take' or op == 'refund') and size > 0 then
    trim(0, now)
    trim(latest + 1, math.huge)
    if number > 1 then
      -- An earlier try may have taken it, and failed.
      drop(string.format('%.0f', number), math.huge)
    end
  end
  holds = holds and size < 1000
  if holds then
    -- A set is not made that would never expire.
    assert(redis.acl_check_cmd('PEXPIRE', key, 1), 'NOPERM the user may not run pexpire')
    local last = math.min(ends or math.huge, now + longest)
    put(string.format('%.0f', number), math.min(took, 100000), last)
    redis.call('PEXPIRE', key, math.ceil((last - now) / 1000) + 1001)
  end
  return holds and 1 or 0, math.min((count(now, latest)), 100000)
end
local function answer(KEYS, ARGV)
  took = 0
  local reply = run(KEYS, ARGV)
  if type(reply) ~= 'string' or #ARGV[2] < tail then
    return reply
  end
  local now, spent = struct.unpack('<dd', reply)
  -- What cannot be held is as good as charged.
  local ok, isHeld, held = pcall(hold, KEYS[1] .. ' held', ARGV[1], now, spent, struct.unpack('<ddd', ARGV[2], tail))
  return reply .. struct.pack('<dd', ok and isHeld or 0, ok and held or 0)
end
