-- What the scripts of sorted sets share: a request of cost n has n members, its
-- ID and, after the first, the ID with a number.

-- Adds the members with a score, or removes them if there is none, and returns
-- how many were new, or were there.
local function members(n, id, score)
  if n == 1 then
    local sum = score and redis.call('ZADD', KEYS[1], score, id) or redis.call('ZREM', KEYS[1], id)
    wrote = true
    return sum
  end
  local sum, done = 0, 0
  while done < n do
    -- A call takes no more than a few thousand arguments.
    local args, last = {}, math.min(n, done + 1000)
    for part = done, last - 1 do
      if score then
        args[#args + 1] = score
      end
      args[#args + 1] = part == 0 and id or id .. string.format(':%05d', part)
    end
    sum = sum + redis.call(score and 'ZADD' or 'ZREM', KEYS[1], unpack(args))
    done, wrote = last, true
  end
  return sum
end

