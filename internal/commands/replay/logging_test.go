package replay_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// logged replays a log by a site with these directives and log directives.
func logged(t *testing.T, directives, log string) (result.Replay, error) {
	t.Helper()
	return rerun(t, "http://example.com {\n"+directives+"\n}\n", replay.Config{Logs: []string{"-"}, Stdin: strings.NewReader(log), Suggest: -1})
}

func leftOut(a result.Replay) (names []string) {
	for _, z := range a.LeftOut {
		names = append(names, z.Zone)
	}
	return names
}

const filteredZones = `
	rate_limit {
		zone ip {
			key {client_ip}
			events 1
			window 1h
		}
		zone header {
			key {header.X-Key}
			events 1
			window 1h
		}
		zone tier {
			match {
				header X-Key gold
			}
			key static
			events 1
			window 1h
		}
		zone cookie {
			key {cookie.session}
			events 1
			window 1h
		}
		zone query {
			key {query.token}
			events 1
			window 1h
		}
		zone path {
			match {
				path /api/*
			}
			key static
			events 1
			window 1h
		}
		zone slots {
			key static
			events 1
			algorithm concurrency
		}
	}
	respond hello`

// TestFiltersOfTheLogAreNamed: zones that need what a filter of the config's log changes are left out, and no
// others.
func TestFiltersOfTheLogAreNamed(t *testing.T) {
	headers := `"X-Key":["k"],"Cookie":["session=s"]`
	line := strings.Replace(entry(0, 0, "192.0.2.1", "/api/a?token=t", 200, headers), "http.log.access", "http.log.access.log0", 1)
	for _, test := range []struct{ filters, want string }{
		{"level delete", ""},
		{"request>client_ip ip_mask 16 32", "ip"},
		{"request>client_ip delete", "ip"},
		{"request>headers>X-Key delete", "header tier"},
		{"request>headers>X-Key hash", "tier"},
		{"request>headers>X-Key replace x", "header tier"},
		{"request>headers>X-Key rename key", "header tier"},
		{"request>headers>X-Other delete", ""},
		{"request>headers delete", "header tier cookie"},
		{"request>headers>Cookie cookie {\nreplace session x\n}", "cookie"},
		{"request>headers>Cookie cookie {\nhash session\n}", ""},
		{"request>headers>Cookie cookie {\ndelete other\n}", ""},
		{"request>uri query {\nreplace token x\n}", "query"},
		{"request>uri query {\ndelete other\n}", ""},
		{"request>uri regexp a b", "query path"},
		{"duration regexp a b", "slots"},
	} {
		a, err := logged(t, "log {\nformat filter {\n"+test.filters+"\n}\n}"+filteredZones, line)
		redistest.Must(t, err)
		if got := strings.Join(leftOut(a), " "); got != test.want {
			t.Errorf("%s: left out %q, want %q: %+v", test.filters, got, test.want, a.LeftOut)
		}
		if test.want != "" && !strings.Contains(a.LeftOut[0].Reason, "log log0 has the filter "+strings.Fields(test.filters)[1]) {
			t.Errorf("%s: the reason is %s", test.filters, a.LeftOut[0].Reason)
		}
	}
}

// TestOnlyTheLogsOfALoggerMatter, if the entry says which; otherwise any log of the config may have written it.
func TestOnlyTheLogsOfALoggerMatter(t *testing.T) {
	site := "log open {\nformat json\n}\nlog masked {\nformat filter {\nrequest>client_ip ip_mask 16 32\n}\n}" + filteredZones
	for logger, want := range map[string]string{
		"http.log.access.open": "", "http.log.access.masked": "ip", "http.log.access": "ip", "http.log.access.gone": "ip",
	} {
		a, err := logged(t, site, strings.Replace(entry(0, 0, "192.0.2.1", "/", 200, ""), "http.log.access", logger, 1))
		redistest.Must(t, err)
		if got := leftOut(a); slices.Contains(got, "ip") != (want == "ip") {
			t.Errorf("%s: left out %v", logger, got)
		}
	}
}

// TestAddressesInPlaceOfKeysAreNamed: requests without what the key names are counted by their address, which is
// noted; if the log hides it, the zone is left out as soon as there is one.
func TestAddressesInPlaceOfKeysAreNamed(t *testing.T) {
	with, without := entry(0, 0, "192.0.2.1", "/", 200, `"X-Key":["k"]`), entry(1, 0, "192.0.2.1", "/", 200, "")
	zone := "rate_limit {\nzone api {\nkey {header.X-Key}\nevents 1\nwindow 1h\n}\n}\nrespond hello"
	masked := "log {\nformat filter {\nrequest>client_ip ip_mask 16 32\n}\n}\n" + zone
	a, err := logged(t, zone, with+without)
	redistest.Must(t, err)
	if notes := strings.Join(a.Notes, "\n"); !strings.Contains(notes, "zone api: 1 of 2 requests have nothing that its key names") {
		t.Errorf("the notes lack the address: %s", notes)
	}
	a, err = logged(t, masked, with)
	redistest.Must(t, err)
	if len(a.LeftOut) > 0 || len(a.Notes) > 0 {
		t.Errorf("no request needs its address, but %+v", a)
	}
	a, err = logged(t, masked, with+with+without)
	redistest.Must(t, err)
	if got := leftOut(a); !slices.Equal(got, []string{"api"}) || len(a.Zones) > 0 || !strings.Contains(strings.Join(a.Notes, "\n"), "zone api had refused 1 requests before it was left out") {
		t.Errorf("left out %v: %+v", got, a)
	}
}

// TestNotesWhatTheConfigDoesNotLog: requests that the log leaves out by the config count nowhere.
func TestNotesWhatTheConfigDoesNotLog(t *testing.T) {
	const zone = "rate_limit {\nzone api {\nkey {client_ip}\nevents 1\nwindow 1h\n}\n}\nrespond hello"
	line := strings.Replace(entry(0, 0, "192.0.2.1", "/", 200, ""), "http.log.access", "http.log.access.log0", 1)
	combined := `192.0.2.1 - - [10/Oct/2025:13:55:36 -0700] "GET / HTTP/1.1" 200 5 "-" "-"` + "\n"
	for _, test := range []struct{ directives, log, want string }{
		{"log", line, ""},
		{"log {\nsampling {\ninterval 1m\nfirst 1\nthereafter 10\n}\n}", line, "sampling of log log0"},
		{"log {\nlevel ERROR\n}", line, "level ERROR of log log0"},
		{"log\nlog_skip /health", line, "log_skip"},
		{"log_skip /health", combined, ""},
		{"}\nhttp://a.example.com {\nlog", line, "skip_hosts example.com"},
	} {
		a, err := logged(t, zone+"\n"+test.directives, test.log)
		redistest.Must(t, err)
		notes := strings.Join(a.Notes, "\n")
		if (test.want == "") == strings.Contains(notes, "keeps requests out") || !strings.Contains(notes, test.want) {
			t.Errorf("%s: want %q of the notes: %s", test.directives, test.want, notes)
		}
	}
}

// TestReadsEntriesAsTheConfigWritesThem, and otherwise names the option that is missing.
func TestReadsEntriesAsTheConfigWritesThem(t *testing.T) {
	const zone = "rate_limit {\nzone api {\nkey {client_ip}\nevents 1\nwindow 1h\n}\n}\nrespond hello"
	at := func(ts, duration string) string {
		return `{` + ts + `,"logger":"http.log.access","request":{"client_ip":"192.0.2.1","method":"GET","host":"example.com","uri":"/"},` + duration + `"status":200}` + "\n"
	}
	for _, test := range []struct {
		format, line, want string
		arrived            float64
	}{
		{"time_format \"02 Jan 06 15:04 MST\"", at(`"ts":"20 Nov 26 10:00 UTC"`, `"duration":1,`), "", 1795168799},
		{"time_key at\nname_key log", strings.Replace(at(`"at":1795168800.5`, `"duration":1,`), `"logger"`, `"log"`, 1), "", 1795168799.5},
		{"level_key severity", at(`"ts":"20 Nov 26 10:00 UTC"`, `"duration":1,`), "time_format", 0},
		{"time_format 15:04:05", at(`"ts":"10:00:00"`, `"duration":1,`), "time_format", 0},
		{"level_key severity", at(`"at":1795168800.5`, `"duration":1,`), "time_key", 0},
		{"level_key severity", at(`"ts":1795168800.5`, `"duration":"long",`), "duration_format", 0},
		{"level_key severity", at(`"ts":1795168800.5`, ``), "it has no field duration", 0},
	} {
		a, err := logged(t, "log {\nformat json {\n"+test.format+"\n}\n}\n"+zone, test.line)
		switch {
		case test.want == "" && (err != nil || a.To != test.arrived):
			t.Errorf("%s: %v, arrived at %v", test.line, err, a.To)
		case test.want != "" && (err == nil || !strings.Contains(err.Error(), test.want)):
			t.Errorf("%s: %v, want an error with %s", test.line, err, test.want)
		}
	}
}

// TestWouldBeRefusalsAreNone: what is only observed is in no count of what is refused.
func TestWouldBeRefusalsAreNone(t *testing.T) {
	log := entry(0, 0, "192.0.2.1", "/", 200, "") + entry(1, 0, "192.0.2.1", "/", 200, "") + entry(2, 0, "192.0.2.2", "/", 200, "")
	a := run(t, "zone all {\nkey {client_ip}\nevents 1\nwindow 1h\nenforce 0\n}", log, replay.Config{Suggest: -1})
	z := a.Zones[0]
	if a.Refused != 0 || z.Refused != 0 || z.WouldRefuse != 1 || z.ClientsRefused != 0 || z.ClientsWouldRefuse != 1 {
		t.Errorf("replayed as %+v", z)
	}
	if len(z.Top) != 1 || z.Top[0].Refused != 0 || z.Top[0].WouldRefuse != 1 || len(z.Hours) != 1 || z.Hours[0].Refused != 0 || z.Hours[0].WouldRefuse != 1 {
		t.Errorf("clients %+v, hours %+v", z.Top, z.Hours)
	}
}

// TestZonesAreLeftOutOfAllTheirStores: of both while a rollout moves their clients, and with the zone that decides
// where they count.
func TestZonesAreLeftOutOfAllTheirStores(t *testing.T) {
	var log strings.Builder
	for n := range 20 {
		log.WriteString(entry(float64(n), 0, "192.0.2.1", "/", 200, `"Authorization":["`+string(rune('a'+n))+`"]`))
	}
	// The first are decided before the last is read.
	log.WriteString(entry(200, 0, "192.0.2.1", "/", 200, ""))
	log.WriteString(entry(400, 0, "192.0.2.1", "/", 200, `"Authorization":["REDACTED"]`))
	a, err := rerun(t, `{
	rate_limit {
		store memory
		store new memory
	}
}
http://example.com {
	rate_limit {
		rollout new 50
		zone api {
			key {header.Authorization}
			events 5
			window 1h
		}
		zone address {
			key {remote_host}
			events 5
			window 1h
		}
	}
	respond hello
}
`, replay.Config{Logs: []string{"-"}, Stdin: strings.NewReader(log.String()), Suggest: -1})
	redistest.Must(t, err)
	if got := leftOut(a); !slices.Equal(got, []string{"api", "address"}) || len(a.Zones) > 0 {
		t.Errorf("left out %v, but there are %+v", got, a.Zones)
	}
}
