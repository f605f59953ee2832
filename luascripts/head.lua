-- Head: begins every script. What the script for one bucket does follows as the
-- function run, which sets wrote as soon as it has changed what the bucket says.
local wrote = false
-- An instant is believed if, when it was stored, it can have been as far ahead of
-- this server's clock as it is now: not if a clock stored it that was wrong for a
-- while. The clocks of servers that take over from each other may differ by this;
-- package algorithm has the same rule, and the same number.
local grace = 5000000
-- The reading of the clock, which the buckets of a call share.
local time
