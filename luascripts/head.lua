-- Head: begins every script. What the script for one bucket does follows as the
-- function run, which sets wrote as soon as it has changed what the bucket says.
local wrote = false
-- The reading of the clock, which the buckets of a call share.
local time
