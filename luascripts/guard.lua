-- Guard: follows every script. Makes a reply of an error, whose first word says
-- whether the bucket has been changed: REFUSED, it has not; PARTIAL, some of it has.
local function failure(err)
  local text = type(err) == 'table' and err.err or tostring(err)
  return redis.error_reply((wrote and 'PARTIAL ' or 'REFUSED ') .. string.gsub(text, '^%-', ''))
end

