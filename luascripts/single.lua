-- Single: the end of a script that is run for one bucket.
local ok, reply = pcall(answer, KEYS, ARGV)
return ok and type(reply) == 'string' and reply or failure(reply)
