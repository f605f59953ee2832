package replay_test

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
)

// entry is an entry of Caddy's access log: of a request that arrived so many seconds after the beginning
// and took so long.
func entry(second, took float64, client, path string, status int, headers string) string {
	ts := began.Add(time.Duration((second + took) * 1e9))
	return fmt.Sprintf(`{"ts":%d.%09d,"logger":"http.log.access","request":{"remote_ip":"10.0.0.1","client_ip":%q,"proto":"HTTP/1.1","method":"GET","host":"example.com","uri":%q,"headers":{%s}},"duration":%v,"size":5,"status":%d}`+"\n",
		ts.Unix(), ts.Nanosecond(), client, path, headers, took, status)
}

func run(t *testing.T, zones, log string, c replay.Config) result.Replay {
	t.Helper()
	c.Logs, c.Stdin = []string{"-"}, strings.NewReader(log)
	a, err := rerun(t, "http://example.com {\n\trate_limit {\n"+zones+"\n\t}\n\trespond hello\n}\n", c)
	redistest.Must(t, err)
	return a
}

func TestCountsByStatusAndTime(t *testing.T) {
	log := entry(0, 0, "192.0.2.1", "/", 200, "") + entry(1, 0, "192.0.2.1", "/", 304, "") + entry(2, 0, "192.0.2.1", "/", 200, "") +
		entry(3, 0, "192.0.2.1", "/", 200, "") + entry(4, 0, "192.0.2.2", "/", 200, "") + entry(3700, 0, "192.0.2.1", "/", 200, "")
	a := run(t, "zone all {\nkey {client_ip}\nevents 2\nwindow 1h\n}", log, replay.Config{Suggest: -1})
	z := a.Zones[0]
	if a.Requests != 6 || a.Refused != 1 || z.Refused != 1 || z.Clients != 2 || z.ClientsRefused != 1 {
		t.Errorf("replayed as %+v", a)
	}
	start := began.Unix()
	if want := []result.Hour{{Start: start, Requests: 5, Refused: 1}, {Start: start + 3600, Requests: 1}}; !slices.Equal(z.Hours, want) {
		t.Errorf("hours are %v, want %v", z.Hours, want)
	}
	if len(z.Top) != 1 || z.Top[0].Values[0] != "192.0.2.1" || z.Top[0].Requests != 5 {
		t.Errorf("refused most are %+v", z.Top)
	}
}

// TestLeasesAreRenewed: a slot is taken for as long as its request runs, although that is longer than the
// lease of a process that died.
func TestLeasesAreRenewed(t *testing.T) {
	log := entry(20, 1, "192.0.2.1", "/", 200, "") + entry(1, 58, "192.0.2.1", "/", 200, "") + entry(60, 1, "192.0.2.1", "/", 200, "")
	a := run(t, "zone slots {\nkey {client_ip}\nevents 1\nwindow 3s\nalgorithm concurrency\n}", log, replay.Config{Suggest: 0})
	if a.Refused != 1 {
		t.Errorf("%d requests are refused, want the one that arrived meanwhile", a.Refused)
	}
	if s := a.Zones[0].Suggestions; len(s) != 1 || s[0].Events != 2 {
		t.Errorf("suggested %+v, want 2 slots", s)
	}
}

// TestNamesWhatLogsLack: zones that a log cannot decide about are left out, with the reason.
func TestNamesWhatLogsLack(t *testing.T) {
	zone := func(name, key, more string) string {
		return "zone " + name + " {\nkey " + key + "\nevents 1\nwindow 1h\n" + more + "\n}\n"
	}
	zones := zone("ip", "{client_ip}", "") + zone("auth", "{header.Authorization} {client_ip}", "") + zone("session", "{cookie.session}", "") +
		zone("body", "{http.request.body}", "") + zone("plugin", "{http.geo.country}", "") + zone("vars", "{vars.tenant}", "") +
		zone("tokens", "{client_ip}", "cost {http.rate_limit.response.json.usage}") + zone("file", "{client_ip}", "match {\nfile /x\n}") +
		zone("key", "{header.X-Key} {client_ip}", "") + zone("slots", "{client_ip}", "algorithm concurrency")
	secret := `"Authorization":["REDACTED"],"Cookie":["REDACTED"]`
	caddyLog := entry(0, 0, "192.0.2.1", "/", 200, "") + entry(1, 0, "192.0.2.1", "/", 200, secret)
	combined := `192.0.2.1 - - [10/Oct/2025:13:55:36 -0700] "GET / HTTP/1.1" 200 5 "-" "-"` + "\n"
	for name, test := range map[string]struct{ log, host, left, reason string }{
		"Caddy's":            {caddyLog, "", "auth session body plugin vars tokens file", "{http.request.header.Authorization}: the log shows it as REDACTED"},
		"combined":           {combined, "", "ip auth session body plugin vars tokens file key slots", "{http.request.host}: the log has no hosts: give one with --host"},
		"combined, for host": {combined, "example.com", "auth session body plugin vars tokens file key slots", "{http.request.header.Authorization}: the log does not have that header"},
	} {
		a := run(t, zones, test.log, replay.Config{Suggest: -1, Host: test.host})
		var left, reasons []string
		for _, z := range a.LeftOut {
			left, reasons = append(left, z.Zone), append(reasons, z.Reason)
		}
		if strings.Join(left, " ") != test.left || !strings.Contains(strings.Join(reasons, "\n"), test.reason) {
			t.Errorf("%s: left out %s, want %s: %s", name, left, test.left, strings.Join(reasons, "\n"))
		}
	}
}

// TestNotesWhatIsNotFollowed names handlers, error routes and requests that are not what they were.
func TestNotesWhatIsNotFollowed(t *testing.T) {
	log := "nonsense\n" + `{"level":"info","msg":"hello"}` + "\n" + entry(0, 0, "192.0.2.1", "/", 200, "") + entry(100, 0, "192.0.2.1", "/", 200, "") +
		entry(200, 0, "192.0.2.1", "/", 200, "") + entry(50, 151, "192.0.2.1", "/", 200, "") + strings.Replace(entry(202, 0, "192.0.2.1", "/", 429, ""), `"size"`, `"rate_limit":{"zone":"all","outcome":"refused"},"size"`, 1)
	a, err := rerun(t, `http://example.com {
	route {
		forward_auth localhost:1 {
			uri /auth
		}
		rate_limit {
			zone all {
				key {client_ip}
				events 3
				window 1h
				max_wait 1s
			}
		}
		respond hello
	}
	handle_errors {
		rate_limit {
			zone errors {
				key {client_ip}
				events 3
				window 1h
			}
		}
	}
}
`, replay.Config{Logs: []string{"-"}, Stdin: strings.NewReader(log), Suggest: -1})
	redistest.Must(t, err)
	notes := strings.Join(a.Notes, "\n")
	for _, want := range []string{
		"http.handlers.reverse_proxy", "handle_errors", "max_wait of zone all", "1 requests were refused by a limit when they were logged",
		"1 requests took longer than 1m0s", `1 lines are unreadable, the first is "nonsense"`, "1 entries of the log are about no request",
	} {
		if !strings.Contains(notes, want) {
			t.Errorf("the notes lack %q:\n%s", want, notes)
		}
	}
}

// TestSuggestsTheLeastLimit: with each suggested limit in place of the zone's, at most the share of the
// clients is refused, as the suggestion says, and with one event less more are.
func TestSuggestsTheLeastLimit(t *testing.T) {
	const share = 0.02
	file := filepath.Join(t.TempDir(), "access.log")
	var log strings.Builder
	stream := &traffic{lines: sweep.Size(2_000, 8_000), clients: 100, perSecond: 50}
	for range stream.lines {
		log.Write(stream.line(nil))
		stream.written++
	}
	redistest.Must(t, os.WriteFile(file, []byte(log.String()), 0o600))
	again := func(algorithm, window string, events int64, suggest float64) result.Zone {
		a, err := rerun(t, fmt.Sprintf("http://example.com {\n\trate_limit {\n\t\tzone all {\n\t\t\tkey {client_ip}\n\t\t\tevents %d\n\t\t\twindow %s\n\t\t\talgorithm %s\n\t\t}\n\t}\n}\n", events, window, algorithm),
			replay.Config{Logs: []string{file}, Suggest: suggest})
		redistest.Must(t, err)
		return a.Zones[0]
	}
	for _, algorithm := range []string{"fixed_window", "sliding_window", "sliding_log", "gcra"} {
		for _, s := range again(algorithm, "30s", 10, share).Suggestions {
			window := time.Duration(s.Window * 1e9).String()
			got := again(algorithm, window, s.Events, -1)
			t.Logf("%s, %s: %d events refuse %d of %d clients (%s)", algorithm, window, s.Events, got.ClientsRefused, got.Clients, s.How)
			if got.ClientsRefused != s.Refused || s.Refused > int64(share*float64(got.Clients)) {
				t.Errorf("%s, %s: %d events refuse %d of %d clients, the suggestion says %d", algorithm, window, s.Events, got.ClientsRefused, got.Clients, s.Refused)
			}
			if algorithm == "gcra" || s.Events == 1 {
				continue
			}
			if less := again(algorithm, window, s.Events-1, -1); less.ClientsRefused <= int64(share*float64(less.Clients)) {
				t.Errorf("%s, %s: %d events are enough, suggested are %d", algorithm, window, s.Events-1, s.Events)
			}
		}
	}
}

// TestSuggestionsAreForEachZoneAlone: what one zone refuses counts for the suggestions for others.
func TestSuggestionsAreForEachZoneAlone(t *testing.T) {
	var log strings.Builder
	for n := range 10 {
		log.WriteString(entry(float64(n), 0, "192.0.2.1", "/", 200, ""))
	}
	var decided []limiter.Decision
	a := run(t, "zone few {\nkey {client_ip}\nevents 2\nwindow 1h\n}\nzone many {\nkey {client_ip}\nevents 100\nwindow 1h\n}", log.String(),
		replay.Config{Suggest: 0, Decided: func(_ *replay.Line, d limiter.Decision) { decided = append(decided, d) }})
	if len(decided) != 20 || a.Zones[1].Suggestions[0].Events != 10 || a.Refused != 8 {
		t.Errorf("%d decisions, %+v", len(decided), a.Zones)
	}
}

// TestShortLinesSettleByTheirHeaders as well, of which a chunk of the log has more than of long ones.
func TestShortLinesSettleByTheirHeaders(t *testing.T) {
	var log strings.Builder
	for n := range 2000 {
		log.WriteString(strings.Replace(entry(float64(n)/100, 0, "192.0.2.1", "/", 200, ""), `"size"`, `"resp_headers":{"X-Cost":["2"]},"size"`, 1))
	}
	a := run(t, "zone all {\nkey {client_ip}\nevents 1000\nwindow 1h\ncost {http.response.header.X-Cost}\n}", log.String(), replay.Config{Suggest: -1})
	if a.Refused != 1500 {
		t.Errorf("%d requests are refused, want all but the 500 that cost 2 each", a.Refused)
	}
}
