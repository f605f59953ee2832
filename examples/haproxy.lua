-- For haproxy.cfg: asks the limiter at a URL whether a request may pass, and
-- puts its answer into variables: limiter_status, and limiter_<header> of each
-- header that clients are to see. Without an answer there are none.

local shown = {
	"retry-after", "x-ratelimit-limit", "x-ratelimit-remaining", "x-ratelimit-reset",
	"ratelimit", "ratelimit-policy",
}

core.register_action("ask_limiter", { "http-req" }, function(txn, url)
	local answer = core.httpclient():get({
		url = url,
		headers = {
			-- To count by a key, name its header in the limiter's config, and pass on
			-- all its lines: the limiter answers 400 where they differ.
			-- ["x-api-key"] = txn.http:req_get_headers()["x-api-key"],
			["x-forwarded-for"] = { txn.f:src() },
		},
	})
	if not answer or not answer.status then
		return
	end
	txn:set_var("txn.limiter_status", answer.status)
	for _, name in ipairs(shown) do
		local values = answer.headers[name]
		if values then
			txn:set_var("txn.limiter_" .. name:gsub("-", "_"), values[0])
		end
	end
end, 1)
