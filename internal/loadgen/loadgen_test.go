//go:build check

package loadgen

import (
	"context"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

func TestRunSendsTheRequestedLoad(t *testing.T) {
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
	// In a moment, a busy machine may send nothing.
	for d, answered := 50*time.Millisecond, int64(0); answered == 0; d *= 2 {
		result, err := Run(t.Context(), Options{Addr: strings.TrimPrefix(server.URL, "http://"), Duration: d})
		if err != nil || result.Status[404] != result.Requests || d > time.Minute {
			t.Fatalf("within %v, result %v, error %v", d, result, err)
		}
		answered = result.Requests
	}
}

// TestPacedKeepsTheRate: requests are sent when they are due, and the wait for a
// connection counts.
func TestPacedKeepsTheRate(t *testing.T) {
	const stall = 100 * time.Millisecond
	var served atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		if served.Add(1) == 20 {
			time.Sleep(stall) // requests are due meanwhile
		}
	}))
	defer server.Close()
	result, err := Run(t.Context(), Options{
		Addr: strings.TrimPrefix(server.URL, "http://"), Rate: 200, Duration: 500 * time.Millisecond,
	})
	if err != nil {
		t.Fatal(err)
	}
	if result.Requests != 100 || len(result.Latencies) != 100 || len(result.Lags) != 100 || len(result.Times) != 100 {
		t.Fatalf("%d answers, %d latencies, %d lags, %d times, want 100 each",
			result.Requests, len(result.Latencies), len(result.Lags), len(result.Times))
	}
	if result.Elapsed < 490*time.Millisecond {
		t.Errorf("it took %v, want half a second", result.Elapsed)
	}
	if longest := Quantile(result.Latencies, 1); longest < stall {
		t.Errorf("the longest took %v, want at least %v", longest, stall)
	}
	// On one connection they are sent one after the other, so that times without
	// the waiting do not overlap.
	sum := time.Duration(0)
	for _, took := range result.Times {
		sum += took
	}
	if sum > result.Elapsed {
		t.Errorf("from when they were sent they took %v within %v", sum, result.Elapsed)
	}
	// Of the requests due during the stall, half waited for half of it.
	waited := 0
	for _, lag := range result.Lags {
		if lag > stall/2-5*time.Millisecond {
			waited++
		}
	}
	if waited < 9 {
		t.Errorf("%d requests waited for the one before, want 9 or more", waited)
	}
}

func TestPacedEndsWithTheContext(t *testing.T) {
	server := httptest.NewServer(http.NotFoundHandler())
	defer server.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := Run(ctx, Options{Addr: strings.TrimPrefix(server.URL, "http://"), Rate: 100, Connections: 2})
		ended <- err
	}()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Error("Run outlasts its context")
	}
}

// TestAnswersOfAllKinds: answers without a length, or ended by the connection, are read
// as well.
func TestAnswersOfAllKinds(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("X-Key") {
		case "0":
			_, _ = w.Write([]byte("short"))
		case "1":
			_, _ = w.Write(make([]byte, 100_000))
		case "2":
			w.WriteHeader(http.StatusNoContent)
		case "3":
			w.Header().Set("Content-Length", "10000")
			_, _ = w.Write(make([]byte, 10_000))
		case "4":
			w.Header().Set("Connection", "close")
		}
	}))
	defer server.Close()
	result, err := Run(t.Context(), Options{
		Addr: strings.TrimPrefix(server.URL, "http://"), Header: "X-Key", Requests: 10,
		Key: func(n int64) string { return strconv.FormatInt(n/2, 10) },
	})
	if err == nil || !strings.Contains(err.Error(), "closed") {
		t.Errorf("error %v, want that the connection was closed", err)
	}
	if result.Status[200] != 7 || result.Status[204] != 2 {
		t.Errorf("statuses are %v, want 7 and 2", result.Status)
	}
}

func TestQuantile(t *testing.T) {
	all := []time.Duration{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}
	for part, want := range map[float64]time.Duration{0: 1, 0.5: 6, 0.99: 10, 0.999: 10, 1: 10} {
		if got := Quantile(all, part); got != want {
			t.Errorf("the quantile %v is %d, want %d", part, got, want)
		}
	}
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("the quantile of nothing is %d", got)
	}
}

func TestSleeperSleepsLongEnough(t *testing.T) {
	const span = 200 * time.Microsecond
	took := make([]time.Duration, 50)
	sleep := NewSleeper()
	defer sleep.Close()
	for i := range took {
		start := time.Now()
		sleep.Until(start.Add(span))
		took[i] = time.Since(start)
	}
	slices.Sort(took)
	t.Logf("the median of sleeps of %v is %v, the longest %v", span, took[len(took)/2], took[len(took)-1])
	if took[0] < span {
		t.Errorf("a sleep took %v, want at least %v", took[0], span)
	}
}
