// Command caddy is Caddy with its standard modules, the rate_limit handler and the rate limit service.
package main

import (
	caddycmd "github.com/caddyserver/caddy/v2/cmd"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/shardlimit/caddy-shardlimit"
	_ "github.com/shardlimit/caddy-shardlimit/service"
)

func main() {
	caddycmd.Main()
}
