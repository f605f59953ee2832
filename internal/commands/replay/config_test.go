package replay_test

import (
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2/caddyconfig"

	_ "github.com/shardlimit/caddy-shardlimit" // registers the modules of configs
	"github.com/shardlimit/caddy-shardlimit/internal/commands"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
)

// TestReplayNeedsNoStores: stores of a config, those of one handler included, are replaced by memory, so that
// neither their servers nor their secrets are needed. Handlers that share a store still count together, and
// max_new_buckets holds.
func TestReplayNeedsNoStores(t *testing.T) {
	text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(`{
	rate_limit {
		store shared redis {
			max_new_buckets 1
			shard a {
				primary localhost:1
				password {file./nowhere/password}
			}
		}
		store own memory
	}
}
http://example.com {
	route {
		rate_limit {
			store shared
			zone shared {
				key {header.X-User}
				events 1
				window 1h
			}
		}
		rate_limit {
			store own
			zone own {
				key {client_ip}
				events 2
				window 1h
			}
		}
	}
}
`), nil)
	if err != nil {
		t.Fatal(err)
	}
	// A Caddyfile cannot define the store of one handler.
	text = []byte(strings.Replace(string(text), `"store":"own"`, `"store":{"module":"redis","shards":[{"name":"b","primary":"localhost:2"}]}`, 1))
	var log strings.Builder
	for _, user := range []string{"a", "b", "c", "d"} {
		log.WriteString(`{"ts":1772323200.5,"request":{"remote_ip":"192.0.2.1","method":"GET","host":"example.com","uri":"/","headers":{"X-User":["` + user + `"]}},"duration":0,"status":200}` + "\n")
	}
	a, err := commands.ReplayConfig(t.Context(), text, replay.Config{Logs: []string{"-"}, Stdin: strings.NewReader(log.String()), Suggest: -1})
	if err != nil {
		t.Fatal(err)
	}
	// The first client is let in; the others share a bucket, which has room for one.
	if len(a.Zones) != 2 || a.Zones[0].Refused != 2 || a.Zones[0].Clients != 4 || a.Zones[1].Requests != 2 || a.Zones[1].Refused != 0 {
		t.Errorf("replayed as %+v", a)
	}
}

// TestReplayKnowsItsUnits: durations that are whole numbers are in the unit that the config's log has, and dates
// may be in all formats of Caddy.
func TestReplayKnowsItsUnits(t *testing.T) {
	run := func(format, ts, duration string) (took time.Duration, ended time.Time, err error) {
		text, _, err := caddyconfig.GetAdapter("caddyfile").Adapt([]byte(`http://example.com {
	log {
		format `+format+`
	}
	rate_limit {
		zone api {
			key {client_ip}
			events 1
			window 1h
		}
	}
}
http://other.example.com {
	log {
		format filter {
			wrap json {
				duration_format seconds
			}
			fields request>headers delete
		}
	}
}
`), nil)
		if err != nil {
			t.Fatal(err)
		}
		line := `{"ts":` + ts + `,"request":{"remote_ip":"192.0.2.1","method":"GET","host":"example.com","uri":"/"},"duration":` + duration + `,"status":200}` + "\n"
		_, err = commands.ReplayConfig(t.Context(), text, replay.Config{Logs: []string{"-"}, Stdin: strings.NewReader(line), Suggest: -1, Decided: func(l *replay.Line, _ limiter.Decision) {
			took, ended = time.Duration(l.End-l.At), time.Unix(0, l.End).UTC()
		}})
		return took, ended, err
	}
	for _, log := range []struct {
		format, duration string
		want             time.Duration
	}{
		{"json", "1.5", 1500 * time.Millisecond},
		{"json", "2", 2 * time.Second},
		{"json", `"1.5s"`, 1500 * time.Millisecond},
		{"json {\nduration_format ms\n}", "1500", 1500 * time.Millisecond},
		{"json {\nduration_format nanos\n}", "1500000000", 1500 * time.Millisecond},
		{"append {\nwrap json {\nduration_format milli\n}\na b\n}", "2", 2 * time.Millisecond},
	} {
		if took, _, err := run(log.format, "1772323200.5", log.duration); err != nil || took.Round(time.Microsecond) != log.want {
			t.Errorf("%s, %s: %v, %v, want %v", log.format, log.duration, took, err, log.want)
		}
	}
	for _, ts := range []string{"1772323200.25", "1772323200250", "1772323200250000000", `"2026-03-01T00:00:00.25Z"`, `"2026/03/01 00:00:00.250"`, `"2026/03/01 00:00:00.250000000"`} {
		if _, ended, err := run("json", ts, "0"); err != nil || ended != time.Date(2026, 3, 1, 0, 0, 0, 250_000_000, time.UTC) {
			t.Errorf("%s: %v, %v", ts, ended, err)
		}
	}
	if _, _, err := run("filter {\nwrap json {\nduration_format ms\n}\nfields a delete\n}\n}\nlog other {\nformat json {\nduration_format ns\n}", "1772323200.5", "1"); err == nil || !strings.Contains(err.Error(), "duration_format") {
		t.Errorf("two units: %v", err)
	}
}
