package limiter

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unsafe"

	"github.com/caddyserver/caddy/v2/modules/caddyhttp"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// readerFromWriter notes that it was given a reader, as net/http's writer is
// for sendfile.
type readerFromWriter struct {
	*httptest.ResponseRecorder
	given io.Reader
}

func (w *readerFromWriter) ReadFrom(r io.Reader) (int64, error) {
	w.given = r
	return io.Copy(w.ResponseRecorder, r)
}

func TestReadFromReachesTheServersWriter(t *testing.T) {
	below := &readerFromWriter{ResponseRecorder: httptest.NewRecorder()}
	tr := newTracker(below, nil, 1)
	body := strings.NewReader("body")
	n, err := tr.ReadFrom(body)
	if err != nil || n != 4 {
		t.Fatalf("copied %d bytes, error %v", n, err)
	}
	if below.given != io.Reader(body) {
		t.Errorf("the server's writer was given %T", below.given)
	}
	if !tr.settled {
		t.Error("the request is not settled")
	}
}

func TestInformationalStatusesAreNotFinal(t *testing.T) {
	tr := newTracker(httptest.NewRecorder(), nil, 1)
	tr.WriteHeader(http.StatusEarlyHints)
	if tr.settled {
		t.Error("the request is settled by an informational status")
	}
	tr.WriteHeader(http.StatusSwitchingProtocols)
	if !tr.settled {
		t.Error("the request is not settled by the upgrade")
	}
}

// TestRequestStateIsSmall: the state of a request in one zone fits into the size class of
// 640 bytes, of which Go takes 8; the next class has 704.
func TestRequestStateIsSmall(t *testing.T) {
	if n := unsafe.Sizeof(struct {
		tracker
		roomForOne
	}{}); n > 632 {
		t.Errorf("%d bytes, want 632 at most", n)
	}
}

// TestLimitHeadersDoNotAllocate: their values are parts of a string that responses share.
func TestLimitHeadersDoNotAllocate(t *testing.T) {
	h, z, tr := http.Header{}, &Zone{Name: "api"}, new(tracker)
	st := store.State{Allowed: true, Limit: 5000, Remaining: 4000, Used: 1000, Reset: 1_795_258_977_534_988}
	const requests = 10
	if n := testing.AllocsPerRun(100, func() {
		for range requests {
			tr.setLimitHeaders(h, z, &st)
		}
	}); n >= requests {
		// One, but with the race detector, which drops some of what is pooled.
		t.Errorf("%v allocations for %d requests", n, requests)
	}
}

// TestHeadersOfUndecidedZones: a zone without an answer shows nothing, wherever it
// stands. Such a zone may have taken before the request waited.
func TestHeadersOfUndecidedZones(t *testing.T) {
	undecided, decided := store.State{}, store.State{Allowed: true, Limit: 5, Remaining: 4, Used: 1, Now: 1, Reset: 2}
	for name, states := range map[string][]store.State{
		"first": {undecided, decided}, "last": {decided, undecided}, "alone": {undecided},
	} {
		for _, format := range []string{HeadersGitHub, HeadersBoth} {
			t.Run(name+" "+format, func(t *testing.T) {
				w := httptest.NewRecorder()
				e := &evaluation{limiter: &Limiter{Config: Config{Headers: format}}}
				for i := range states {
					limit := &store.Limit{Zone: "api", Window: 1}
					e.zones = append(e.zones, &inZone{
						boundZone: &boundZone{Zone: &Zone{Name: "api"}}, of: e, answer: answerOf(&states[i]),
						ask: store.Ask{Request: store.Request{Limit: limit, Events: 5, Cost: 1}, State: states[i]},
					})
				}
				tr := &tracker{ResponseWriterWrapper: caddyhttp.ResponseWriterWrapper{ResponseWriter: w}, own: []*evaluation{e}}
				tr.setHeaders(tr.Header())
				want := "4"
				if name == "alone" {
					want = ""
				}
				if got := w.Header().Get("X-RateLimit-Remaining"); got != want {
					t.Errorf("remaining is %q, want %q", got, want)
				}
				if got := w.Header().Get("RateLimit-Policy"); (got != "") != (format == HeadersBoth) {
					t.Errorf("the policy is %q", got)
				}
			})
		}
	}
}
