package cli

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay/result"
)

func TestShareOf(t *testing.T) {
	for text, want := range map[string]float64{"": -1, "0%": 0, "0.1%": 0.001, "29%": 0.29, "33.3%": 0.333, "58%": 0.58, "100%": 1} {
		if got, err := shareOf(text); err != nil || got != want {
			t.Errorf("%q is %v, %v, want %v", text, got, err, want)
		}
	}
	for _, text := range []string{"0.1", "x%", "-1%", "101%", "NaN%", "1e1%"} {
		if _, err := shareOf(text); err == nil {
			t.Errorf("%q is a share", text)
		}
	}
}

// TestReportsAreSelfContained: reports are well-formed, load nothing, and escape what clients choose.
func TestReportsAreSelfContained(t *testing.T) {
	r := &result.Replay{
		Requests: 10, Refused: 3,
		Zones: []result.Zone{{
			Name: "a", Requests: 10, Refused: 3, Clients: 2, ClientsRefused: 1,
			Hours:       []result.Hour{{Start: 3600, Requests: 4, Refused: 3}, {Start: 3600 * 1000, Requests: 6}},
			Top:         []result.Client{{Client: adminapi.Client{ClientKey: "<script>"}, Refused: 3}},
			Suggestions: []result.Suggestion{{Window: 60, Events: 7, Clients: 2, How: "exact"}},
		}, {Name: "empty"}},
		LeftOut: []result.LeftOut{{Zone: "b", Reason: "<b>"}}, Notes: []string{"note & more"},
	}
	svg := filepath.Join(t.TempDir(), "r.svg")
	page := filepath.Join(t.TempDir(), "r.html")
	for _, file := range []string{svg, page} {
		if err := writeReport(file, r); err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(text, []byte("<script>")) || bytes.Contains(text, []byte("src=")) || bytes.Contains(text, []byte("href=")) || bytes.Contains(text, []byte("<b>")) {
			t.Errorf("%s:\n%s", file, text)
		}
		if file == page && (!bytes.Contains(text, []byte("<td>7<td>")) || !bytes.Contains(text, []byte("note &amp; more"))) {
			t.Errorf("the page lacks something:\n%s", text)
		}
	}
	text, _ := os.ReadFile(svg)
	for d := xml.NewDecoder(bytes.NewReader(text)); ; {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
	}
	if rects := strings.Count(string(text), "<rect"); rects != 3 {
		t.Errorf("%d bars, want 3", rects)
	}
}
