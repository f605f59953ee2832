module github.com/shardlimit/caddy-shardlimit/e2e/clients/call

go 1.26.0

require (
	github.com/google/go-github/v74 v74.0.0
	github.com/hashicorp/go-retryablehttp v0.7.8
)

require (
	github.com/google/go-querystring v1.1.0 // indirect
	github.com/hashicorp/go-cleanhttp v0.5.2 // indirect
)
