-- Head: begins every script. What the script for one bucket does follows as the
-- function run, which sets wrote as soon as it has changed what the bucket says. Beside the reply it returns to
-- held.lua where its numbers end in ARGV[2], the cost and, of a take that was allowed, what that leaves of which
-- capacity, and when it counts no more.
local wrote = false
-- An instant is believed if, when it was stored, it can have been as far ahead of
-- this server's clock as it is now: not if a clock stored it that was wrong for a
-- while. The clocks of servers that take over from each other may differ by this;
-- package algorithm has the same rule, and the same number.
local grace = 5000000
-- Reports whether numbers can be those of a bucket: integers from 0 to 2^53-1, the last that
-- a double holds exactly. Of a bucket with another one, nothing is believed.
local function sound(a, b, c, d, e, f, g)
  d, e, f, g = d or 0, e or 0, f or 0, g or 0
  -- What is infinite, or not a number, has no such remainder.
  return a % 1 + b % 1 + c % 1 + d % 1 + e % 1 + f % 1 + g % 1 == 0
    and math.min(a, b, c, d, e, f, g) >= 0 and math.max(a, b, c, d, e, f, g) <= 9007199254740991
end
-- Returns the number in a field of a hash: 0 if there is none or it is empty, and one that is not
-- sound if the text is none of those to which Redis adds, of which Lua reads more.
local function number(text)
  if not text or text == '' then
    return 0
  end
  return (text == '0' or string.find(text, '^[1-9]%d*$')) and tonumber(text) or -1
end
-- The reading of the clock, which the buckets of a call share.
local time
