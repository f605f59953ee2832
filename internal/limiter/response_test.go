package limiter

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"
)

// readBy returns what is found of a body that passes in parts of n bytes.
func readBy(n int, header http.Header, body string, most int, paths ...string) *response {
	r := &response{began: time.Now(), paths: paths, most: most}
	r.begin(header)
	for rest := []byte(body); len(rest) > 0; {
		part := rest[:min(n, len(rest))]
		r.saw(part)
		rest = rest[len(part):]
	}
	r.end(r.began.Add(1500 * time.Millisecond))
	return r
}

func TestValuesInResponses(t *testing.T) {
	const usage = "usage.total_tokens"
	kinds := map[string]string{"json": "application/json; charset=utf-8", "vendor": "application/vnd.api+json", "events": "text/event-stream", "text": "text/plain"}
	long := strings.Repeat("x", 2000)
	for name, test := range map[string]struct {
		kind, encoding, body string
		want                 any
	}{
		"document":             {"json", "", `{"id": 1, "usage": {"total_tokens": 42}}`, "42"},
		"vendor":               {"vendor", "identity", `{"usage": {"total_tokens": "43"}}`, "43"},
		"without it":           {"json", "", `{"usage": {"tokens": 42}}`, nil},
		"object":               {"json", "", `{"usage": {"total_tokens": {"a": 1}}}`, nil},
		"null":                 {"json", "", `{"usage": {"total_tokens": null}}`, nil},
		"no JSON":              {"json", "", `nonsense`, nil},
		"empty":                {"json", "", ``, nil},
		"another type":         {"text", "", `{"usage": {"total_tokens": 42}}`, nil},
		"compressed":           {"json", "gzip", `{"usage": {"total_tokens": 42}}`, nil},
		"too long":             {"json", "", `{"usage": {"total_tokens": 42}, "text": "` + long + `"}`, nil},
		"torn off":             {"json", "", `{"usage": {"total_tokens": 42}, "text": "abc`, "42"},
		"last event":           {"events", "", "data: {\"usage\": null}\n\nevent: x\ndata: {\"usage\": {\"total_tokens\": 7}}\n\ndata: [DONE]\n\n", "7"},
		"latest of two":        {"events", "", "data: {\"usage\":{\"total_tokens\":7}}\n\ndata: {\"usage\":{\"total_tokens\":9}}\n\n", "9"},
		"lines of one event":   {"events", "", "data: {\"usage\":\ndata: {\"total_tokens\": 8}}\n\n", "8"},
		"CR LF":                {"events", "", ": hello\r\n\r\ndata:{\"usage\":{\"total_tokens\":6}}\r\n\r\n", "6"},
		"no end of the event":  {"events", "", "data: {\"usage\":{\"total_tokens\":5}}", "5"},
		"after a long event":   {"events", "", "data: {\"text\": \"" + long + "\"}\n\ndata: {\"usage\":{\"total_tokens\":4}}\n\n", "4"},
		"before a long event":  {"events", "", "data: {\"usage\":{\"total_tokens\":3}}\n\ndata: {\"text\": \"" + long + "\"}\n\n", "3"},
		"long, CR LF":          {"events", "", "data: {\"text\": \"" + long + "\"}\r\n\r\ndata: {\"usage\":{\"total_tokens\":4}}\r\n\r\n", "4"},
		"in a long event":      {"events", "", "data: {\"usage\":{\"total_tokens\":2}, \"text\": \"" + long + "\"}\n\n", nil},
		"empty lines":          {"events", "", "\n\n\ndata: {\"usage\":{\"total_tokens\":1}}\n\n\n\n", "1"},
		"stream without lines": {"events", "", long, nil},
	} {
		header := http.Header{"Content-Type": {kinds[test.kind]}}
		if test.encoding != "" {
			header.Set("Content-Encoding", test.encoding)
		}
		for _, n := range []int{1, 2, 7, 1 << 20} {
			r := readBy(n, header, test.body, 1024, "id", usage)
			what := fmt.Sprintf("%s, %d bytes at a time", name, n)
			if got, known := r.value(responseJSON + usage); got != test.want || !known {
				t.Errorf("%s: found %v, want %v", what, got, test.want)
			}
			if got, _ := r.value(responseSize); got != fmt.Sprint(len(test.body)) {
				t.Errorf("%s: the size is %v", what, got)
			}
			if got, _ := r.value(responseTime); got != "1500" {
				t.Errorf("%s: it took %v", what, got)
			}
		}
	}
	if _, known := new(response).value("remaining"); known {
		t.Error("the placeholders of a zone named response are taken for those of the response")
	}
}

// TestResponseKeepsLittle of a body, however long that is.
func TestResponseKeepsLittle(t *testing.T) {
	for _, kind := range []string{"application/json", "text/event-stream"} {
		r := &response{paths: []string{"a"}, most: 1000}
		r.begin(http.Header{"Content-Type": {kind}})
		for range 1000 {
			r.saw([]byte(strings.Repeat("data: x", 100)))
			if cap(r.kept) > 2*r.most {
				t.Fatalf("%s: %d bytes are kept of at most %d", kind, cap(r.kept), r.most)
			}
		}
		if r.size != 700_000 {
			t.Errorf("%s: the size is %d", kind, r.size)
		}
	}
}
