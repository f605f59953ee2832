package main

// benchCase is a site of the Caddyfile.
type benchCase struct {
	name string
	addr string
	// status is that of nearly all responses.
	status int
	// floor is the case to compare with, if any, and limit how many times as
	// much the case may cost.
	floor string
	limit float64
	site  string
	// clients is how many distinct client keys there are; 0 means as many as the
	// flag says.
	clients int64
}

const globalOptions = `{
	admin %s
	persist_config off
	log {
		level ERROR
	}
	rate_limit {
		store memory memory
		store redis {
			shard a {
				primary %s
				replica %s
			}
			check_timeout 5s
			charge_timeout 5s
		}
	}
}
`

const fiveHeaders = `
	header X-RateLimit-Limit 50000000
	header X-RateLimit-Remaining 49999999
	header X-RateLimit-Used 1
	header X-RateLimit-Reset 1800000000
	header X-RateLimit-Resource default
`

var cases = []benchCase{
	{name: "respond", status: 200, site: "respond ok"},
	{name: "respond, five headers", status: 200, site: fiveHeaders + "respond ok"},
	{
		name: "memory store", status: 200, floor: "respond, five headers", limit: 1.10, site: `
	rate_limit {
		store memory
		zone memory {
			key {header.X-Key}
			events 50000000
			window 1h
		}
	}
	respond ok`,
	},
	{
		name: "redis store", status: 200, floor: "respond, five headers", limit: 1.40, site: `
	rate_limit {header.X-Key} 50000000 1h
	respond ok`,
	},
	{
		// Each comes once in several seconds, so that little is known of it.
		name: "redis store, 20,000 clients", status: 200, floor: "respond, five headers", clients: 20_000, site: `
	rate_limit {header.X-Key} 50000000 1h many
	respond ok`,
	},
	{
		name: "redis store, one hot key", status: 200, floor: "respond, five headers", site: `
	rate_limit static 50000000 1h hot
	respond ok`,
	},
	{
		name: "redis store, charge before", status: 200, floor: "respond, five headers", site: `
	rate_limit {
		zone before {
			key static
			events 1000000
			window 1m
			charge before
		}
	}
	respond ok`,
	},
	{
		name: "redis store, batch auto", status: 200, floor: "respond, five headers", limit: 1.15, site: `
	rate_limit {
		zone batch {
			key static
			events 1000000
			window 1m
			charge before
			batch auto
		}
	}
	respond ok`,
	},
	{name: "error 429, six headers", status: 429, site: fiveHeaders + "header Retry-After 3600\nerror 429"},
	{
		name: "memory store, refused", status: 429, floor: "error 429, six headers", limit: 1.10, site: `
	rate_limit {
		store memory
		zone refused {
			key {header.X-Key}
			events 1
			window 1h
		}
	}
	respond ok`,
	},
	{
		name: "redis store, refused", status: 429, floor: "error 429, six headers", limit: 1.08, site: `
	rate_limit {header.X-Key} 1 1h refused
	respond ok`,
	},
	{
		name: "redis store, one refused key", status: 429, floor: "error 429, six headers", limit: 1.08, site: `
	rate_limit static 1 1h attacked
	respond ok`,
	},
}
