package redisstore

import (
	"os"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }
