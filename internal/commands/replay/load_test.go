package replay_test

import (
	"encoding/json"
	"io"
	"runtime/debug"
	"strconv"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/caddyconfig"
	_ "github.com/caddyserver/caddy/v2/modules/standard"

	_ "github.com/shardlimit/caddy-shardlimit"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

var quiet = &caddy.Logging{Logs: map[string]*caddy.CustomLog{caddy.DefaultLoggerName: {BaseLog: caddy.BaseLog{Level: "ERROR"}}}}

// rerun replays logs through the limits of a Caddyfile whose stores are in memory.
func rerun(tb testing.TB, caddyfile string, c replay.Config) (result.Replay, error) {
	tb.Helper()
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(caddyfile), nil)
	redistest.Must(tb, err)
	var root struct {
		Apps    map[string]json.RawMessage `json:"apps"`
		Logging json.RawMessage            `json:"logging"`
	}
	redistest.Must(tb, json.Unmarshal(text, &root))
	apps := caddy.ModuleMap{}
	if app := root.Apps["rate_limit"]; app != nil {
		apps["rate_limit"] = app
	}
	loaded, err := caddy.ProvisionContext(&caddy.Config{
		AppsRaw: apps, Logging: quiet,
	})
	redistest.Must(tb, err)
	loaded, unload := caddy.NewContext(loaded)
	defer unload()
	c.HTTP, c.Logging = root.Apps["http"], root.Logging
	return replay.Run(tb.Context(), loaded, c)
}

// traffic writes entries of Caddy's access log, in the order of their ends: requests of many clients
// at some rate, each of which takes up to a quarter of a second.
type traffic struct {
	lines, clients, perSecond int
	written                   int
	rest, buf                 []byte
}

var began = time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)

// paths are those that clients request.
var paths = []string{"/", "/api/items?page=2", "/api/items/17", "/assets/app.js", "/login"}

// Read implements [io.Reader].
func (t *traffic) Read(b []byte) (n int, err error) {
	for n < len(b) {
		if len(t.rest) == 0 {
			if t.written == t.lines {
				return n, io.EOF
			}
			t.buf = t.line(t.buf[:0])
			t.rest = t.buf
			t.written++
		}
		m := copy(b[n:], t.rest)
		t.rest, n = t.rest[m:], n+m
	}
	return n, nil
}

func (t *traffic) line(b []byte) []byte {
	// Some clients come more often than others: a cheap mixture, the same in every run.
	x := uint64(t.written)*0x9e3779b97f4a7c15 + 1
	x ^= x >> 29
	client := int(x % uint64(t.clients))
	if x>>40%3 == 0 {
		client %= max(t.clients/50, 1)
	}
	ms := began.UnixMilli() + int64(t.written)*1000/int64(t.perSecond)
	b = append(b, `{"level":"info","ts":`...)
	b = strconv.AppendInt(b, ms/1000, 10)
	b = append(b, '.')
	b = append(b, strconv.Itoa(int(1000 + ms%1000))[1:]...)
	b = append(b, `,"logger":"http.log.access.log0","msg":"handled request","request":{"remote_ip":"10.`...)
	b = strconv.AppendInt(b, int64(client>>16), 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, int64(client>>8&255), 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, int64(client&255), 10)
	b = append(b, `","remote_port":"41342","client_ip":"10.`...)
	b = strconv.AppendInt(b, int64(client>>16), 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, int64(client>>8&255), 10)
	b = append(b, '.')
	b = strconv.AppendInt(b, int64(client&255), 10)
	b = append(b, `","proto":"HTTP/2.0","method":"GET","host":"example.com","uri":"`...)
	b = append(b, paths[x>>20%uint64(len(paths))]...)
	b = append(b, `","headers":{"User-Agent":["Mozilla/5.0 (X11; Linux x86_64) AppleWebKit/537.36 (KHTML, like Gecko) Chrome/145.0.0.0 Safari/537.36"],"Accept":["text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"],"Accept-Encoding":["gzip, deflate, br"],"X-Api-Key":["key`...)
	b = strconv.AppendInt(b, int64(client/3), 10)
	b = append(b, `"]},"tls":{"resumed":false,"version":772,"cipher_suite":4865,"proto":"h2","server_name":"example.com"}},"bytes_read":0,"user_id":"","duration":0.`...)
	b = append(b, strconv.Itoa(int(1000 + x>>10%250))[1:]...)
	b = append(b, `,"size":2326,"status":`...)
	if status := int64(200); x>>50%10 == 0 {
		b = strconv.AppendInt(b, 304, 10)
	} else {
		b = strconv.AppendInt(b, status, 10)
	}
	return append(b, ",\"resp_headers\":{\"Server\":[\"Caddy\"],\"Content-Type\":[\"text/html; charset=utf-8\"]}}\n"...)
}

// twoZones are limits as sites have them: one for all, and one for an API.
const twoZones = `{
	http_port 8099
}
http://example.com {
	rate_limit {
		zone all {
			key {client_ip}
			events 300
			window 1m
		}
		zone api {
			match {
				path /api/*
			}
			key {header.X-Api-Key} {client_ip}
			events 100
			window 1m
			algorithm sliding_window
		}
	}
	respond "hello"
}
`

// BenchmarkReplay replays b.N lines from memory. On two cores:
//
//	GOMAXPROCS=2 go test -run - -bench 'Replay$' -benchtime 10000000x ./internal/commands/replay
func BenchmarkReplay(b *testing.B) {
	b.ReportAllocs()
	defer debug.SetGCPercent(debug.SetGCPercent(replay.GCPercent))
	a, err := rerun(b, twoZones, replay.Config{
		Logs: []string{"-"}, Stdin: &traffic{lines: b.N, clients: 20_000, perSecond: 3000}, Suggest: -1,
	})
	redistest.Must(b, err)
	if a.Requests != int64(b.N) || len(a.LeftOut) > 0 {
		b.Fatalf("%d requests of %d lines, left out %v", a.Requests, b.N, a.LeftOut)
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "lines/s")
	b.ReportMetric(100*float64(a.Refused)/float64(a.Requests), "%refused")
}
