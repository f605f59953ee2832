-- Held: follows the run of a bucket's script, and keeps beside the bucket what takes hold that may come back.
-- <KEYS[1]> held  string of these takes, each as three packed doubles, its number, its cost and when it is held no
--                 more; in the slot of the bucket, and never a bucket's key, which has no space
-- ARGV[2]  one more packed double, after those of the script; without it, nothing is asked:
--          the number of the take, or of the one that a refund ends; 1 to hold nothing
-- Reply    one more packed double: what is held, of which 100000 may be anything, and less than 0 if the take is;
--          0 for a take that leaves a quarter of the capacity, and 16, about which nothing is looked up
if tail and #ARGV[2] >= tail then
  local op, takes = ARGV[1], ARGV[1] == 'take' and leaves and cost > 0
  if takes and leaves >= 16 and 4 * leaves >= capacity then
    reply = reply .. '\0\0\0\0\0\0\0\0'
  else
    local isDone, held = pcall(function()
      local key, most, longest, writes = KEYS[1] .. ' held', 100, 600000000, op == 'take' or op == 'refund'
      local all, number, now = redis.call('GET', key) or '', struct.unpack('<d', ARGV[2], tail), struct.unpack('<d', reply)
      local holds = takes and number > 1
      if all == '' and not holds then
        return 0
      elseif #all % 24 ~= 0 or #all > 24 * most then
        error('WRONGTYPE the key holds something else than what is held', 0)
      end
      if now == 0 then
        -- The script did without the clock.
        time = time or redis.call('TIME')
        now = time[1] * 1000000 + time[2]
      end
      local text, sum, last = '', 0, now
      for i = 1, #all, 24 do
        local n, amount, till = struct.unpack('<ddd', all, i)
        -- An earlier try may have taken it, and failed.
        local isOwn = writes and n == number
        if not isOwn and till > now and till <= now + longest + grace and sound(n, amount, till) then
          text, sum, last = text .. string.sub(all, i, i + 23), sum + amount, math.max(last, till)
        end
      end
      holds = holds and #text < 24 * most
      if holds then
        local amount, till = math.min(cost, 100000), math.min(ends, now + longest)
        text, sum, last = text .. struct.pack('<ddd', number, amount, till), sum + amount, math.max(last, till)
      end
      if writes and text == '' then
        redis.call('PEXPIRE', key, 0)
      elseif writes and text ~= all then
        redis.call('SET', key, text, 'PX', math.ceil((last - now) / 1000) + 1001)
      end
      return (holds and -1 or 1) * math.min(sum, 100000)
    end)
    if isDone or op ~= 'refund' or cost > 0 then
      -- What cannot be held is as good as charged, and others hold nothing then.
      reply = reply .. struct.pack('<d', isDone and held or 0)
    else
      -- Nothing else was to be done, so it may be tried again.
      ok, reply = false, held
    end
  end
end
