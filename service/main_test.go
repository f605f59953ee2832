package service_test

import (
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"

	_ "github.com/shardlimit/caddy-shardlimit/service" // what cmd/caddy has
)

func TestMain(m *testing.M) { caddytest.Main(m) }
