-- Head: begins every script. What the script for one bucket does follows as the
-- function run, which sets wrote as soon as it has changed what the bucket says.
local wrote = false
