-- Reads a fixed window bucket and changes nothing; runs on replicas too. Who
-- asked judges by the reset whether the window is still open: a replica may
-- hold one that is long over.
-- KEYS[1]  bucket: hash with c = count, r = reset (µs since the epoch)
-- Reply    {count, reset} as texts; two nils if there is no bucket
return redis.call('HMGET', KEYS[1], 'c', 'r')
