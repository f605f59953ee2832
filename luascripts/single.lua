-- Single: the end of a script that is run for one bucket.
local ok, reply, tail, cost, leaves, capacity, ends = pcall(run, KEYS, ARGV)
-- include held
return ok and type(reply) == 'string' and reply or failure(reply)
