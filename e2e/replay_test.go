package e2e

import (
	"compress/gzip"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestReplayCommand replays a log in two files by a Caddyfile, and writes a report. It needs no running
// Caddy.
func TestReplayCommand(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	config, log, old, report := filepath.Join(dir, "Caddyfile"), filepath.Join(dir, "access.log"), filepath.Join(dir, "access.log.1.gz"), filepath.Join(dir, "report.html")
	must(t, "write the config", os.WriteFile(config, []byte(`http://example.com {
	rate_limit {
		zone api {
			key {client_ip}
			events 3
			window 1h
		}
		zone session {
			key {cookie.session}
			events 3
			window 1h
		}
	}
	respond "hello"
}
`), 0o600))
	line := func(second int) string {
		return fmt.Sprintf(`192.0.2.7 - - [10/Oct/2025:13:00:%02d +0000] "GET / HTTP/1.1" 200 5 "-" "curl"`, second) + "\n"
	}
	must(t, "write a log", os.WriteFile(log, []byte(line(4)+line(5)), 0o600))
	file, err := os.Create(old)
	must(t, "create a log", err)
	z := gzip.NewWriter(file)
	_, err = z.Write([]byte(line(1) + line(2) + line(3)))
	must(t, "write a log", err)
	must(t, "write a log", z.Close())
	must(t, "write a log", file.Close())

	must(t, "make a folder", os.Mkdir(filepath.Join(dir, "folder.html"), 0o700))
	run := func(code int, words []string, args ...string) {
		t.Helper()
		args = append([]string{"replay", "--config", config, "--host", "example.com"}, args...)
		in := command
		if code == 0 {
			in = commandProcess
		}
		// Caddy logs which config it reads.
		out, errOut, got := in(t, args...)
		for _, word := range words {
			if !strings.Contains(out+errOut, word) {
				t.Errorf("%v: the output lacks %q", args, word)
			}
		}
		if got != code || t.Failed() {
			t.Errorf("%v: exit code %d, want %d: %s%s", args, got, code, out, errOut)
		}
	}
	run(0, []string{"5 requests, 2025-10-10 13:00Z", "2 (40%)", "{client_ip} 192.0.2.7", "zone session is left out: {http.request.cookie.session}: the log has no cookies"},
		"--suggest", "0%", "--report", report, log, old)
	text, err := os.ReadFile(report)
	must(t, "read the report", err)
	if !strings.Contains(string(text), "<td>5<td>0<td>5<td>exact") {
		t.Errorf("the report lacks a limit of 5:\n%s", text)
	}
	run(0, []string{`"refused": 2`, `"zone": "session"`}, "--json", log, old)
	run(1, []string{"no such file"}, filepath.Join(dir, "none.log"))
	run(1, []string{"no line is an entry"}, config)
	run(1, []string{"such as 0.1%"}, "--suggest", "1", log)
	cut := filepath.Join(dir, "cut.log.gz")
	whole, err := os.ReadFile(old)
	must(t, "read a log", err)
	must(t, "write a log", os.WriteFile(cut, whole[:len(whole)-8], 0o600))
	run(1, []string{"3 requests", "note: read " + cut + ": unexpected EOF", "Error: read " + cut}, cut)
	run(1, []string{"no such file"}, "--report", filepath.Join(dir, "none", "r.html"), log)
	run(1, []string{"2 requests", "write the report"}, "--report", filepath.Join(dir, "folder.html"), log)
	run(1, []string{"must end with"}, "--report", "x.pdf", log)
}
