package ask

import (
	"os"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func TestMain(m *testing.M) { os.Exit(redistest.RunTests(m)) }

var hourly = &store.Limit{Zone: "hourly", Algorithm: store.FixedWindow, Window: time.Hour}
