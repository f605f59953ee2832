package loadgen

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestRunSendsWhatIsAsked(t *testing.T) {
	var served, seen atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served.Add(1)
		if r.Header.Get("X-Key") == "odd" {
			w.WriteHeader(http.StatusTooManyRequests)
		}
	}))
	defer server.Close()
	result, err := Run(t.Context(), Options{
		Addr: strings.TrimPrefix(server.URL, "http://"), Header: "X-Key", Connections: 4, Requests: 1000,
		Key:        func(n int64) string { return [2]string{"even", "odd"}[n%2] },
		OnResponse: func(string, *http.Response) { seen.Add(1) },
	})
	if err != nil {
		t.Fatal(err)
	}
	if result.Requests != 1000 || served.Load() != 1000 || seen.Load() != 1000 {
		t.Errorf("%d answered, %d served, %d seen, want 1000 each", result.Requests, served.Load(), seen.Load())
	}
	if result.Status[200] != 500 || result.Status[429] != 500 {
		t.Errorf("statuses are %v", result.Status)
	}
}

func TestRunEndsInTime(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	result, err := Run(t.Context(), Options{Addr: strings.TrimPrefix(server.URL, "http://"), Duration: 50 * time.Millisecond})
	if err != nil || result.Status[404] == 0 || result.Status[404] != result.Requests {
		t.Errorf("result %v, error %v", result, err)
	}
}
