package calls

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// request is one of a client with a limit that is not reached.
func request(zone string) store.Request {
	return store.Request{
		Limit:     &store.Limit{Zone: zone, Algorithm: store.FixedWindow, Window: time.Hour},
		ClientKey: "client", Events: 1_000_000_000, Cost: 1,
	}
}

// TestCallsAreThoseThatWereMade requires of the count, with a known number of
// calls, that it is neither more nor less: what scripts do inside, replication
// and the asking do not count.
func TestCallsAreThoseThatWereMade(t *testing.T) {
	servers := redistest.StartShard(t, 1)
	// Until this time has passed, a sole writer checks every request.
	opts := usual
	opts.Trust = time.Minute
	p := newProcess(servers, opts)
	defer func() { redistest.Must(t, p.close()) }()
	after, before := virtual{}, virtual{before: true}
	for _, c := range []struct {
		virtual
		times int64
		want  calls
	}{
		{before, 10, calls{primary: 10}},
		// The replica knows no window, so that the primary is asked to open it.
		{after, 1, calls{primary: 2, replica: 1}},
		// The replica, and the charge.
		{after, 10, calls{primary: 10, replica: 10}},
	} {
		was, err := countCalls(servers)
		redistest.Must(t, err)
		for range c.times {
			if c.send(p.ledger, request(fmt.Sprint(c.before))) != 1 {
				t.Fatal("it was refused")
			}
			p.ledger.Flush(t.Context())
			redistest.Must(t, servers.WaitReplicated(t.Context()))
		}
		is, err := countCalls(servers)
		redistest.Must(t, err)
		if got := is.since(was); got != c.want {
			t.Errorf("%+v, %d times: %+v, want %+v", c.virtual, c.times, got, c.want)
		}
	}
}

// TestRefusedTrafficMakesOneCallASecond sends requests of a client over its limit.
func TestRefusedTrafficMakesOneCallASecond(t *testing.T) {
	servers := redistest.StartShard(t, 1)
	for _, v := range []virtual{{}, {before: true}} {
		p := newProcess(servers, usual)
		r := request(fmt.Sprint(v.before))
		full := r
		full.Cost = r.Events
		store.Answers(t.Context(), p.ledger.Charge, []store.Request{full})
		v.send(p.ledger, r)
		begun := time.Now()
		was, err := countCalls(servers)
		redistest.Must(t, err)
		var passed atomic.Int64
		l := load{callers: 64, rate: 10_000, until: begun.Add(2 * time.Second), request: func(context.Context, int) (st store.State) {
			passed.Add(v.send(p.ledger, r))
			return st
		}}
		sent := l.run(t.Context())
		is, err := countCalls(servers)
		redistest.Must(t, err)
		// One at the beginning, and one of the store for the primary's clock. A call that a stalled
		// machine answers too late to go on refusing is made once more.
		if most := 2 * (int64(time.Since(begun).Seconds()) + 2); is.since(was).sum() > most || passed.Load() > 0 || sent.requests == 0 {
			t.Errorf("%+v: %d calls for %d requests, of which %d passed, want at most %d", v, is.since(was).sum(), sent.requests, passed.Load(), most)
		}
		redistest.Must(t, p.close())
	}
}

func TestMeasuringEndsWhenItIsTold(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := measureBatches(ctx, batchLimits[:1], batchProcesses[:1], time.Second); !errors.Is(err, errEnded) {
		t.Errorf("%v", err)
	}
}

func samples() (list []*batched) {
	for _, auto := range []bool{true, false} {
		for _, processes := range batchProcesses {
			for _, limit := range batchLimits {
				b := &batched{batchCase: batchCase{limit, processes, auto}, window: time.Second, admitted: limit}
				b.steady = phase{limit * 8 / 10, calls{primary: 100}}
				b.again = b.steady
				b.heavy = phase{limit * 12 / 10, calls{primary: 100}}
				list = append(list, b)
			}
		}
	}
	return list
}

// TestLoadThatWasNotGeneratedIsSaid requires words where there is no figure.
func TestLoadThatWasNotGeneratedIsSaid(t *testing.T) {
	list := samples()
	list[0].steady.requests, list[0].heavy.requests = 700, 1099
	// Of heavy traffic, two figures are missing.
	if text := batchTable(list); strings.Count(text, "load not generated") != 3 {
		t.Error(text)
	}
}

// TestTablesAreWhole requires as many cells in each row as there are in the
// head.
func TestTablesAreWhole(t *testing.T) {
	for text, want := range map[string]int{batchTable(samples()): 2 + 12} {
		rows, cells := 0, 0
		for line := range strings.Lines(text) {
			n := strings.Count(line, "|")
			if rows++; rows == 1 {
				cells = n
			}
			if n != cells {
				t.Errorf("%d cells, want %d: %s", n-1, cells-1, line)
			}
		}
		if rows != want {
			t.Errorf("%d rows, want %d:\n%s", rows, want, text)
		}
	}
}

// BenchmarkBatches measures what calls a request costs with batches, and which part of
// the limit nobody got, through four processes.
func BenchmarkBatches(b *testing.B) {
	for _, limit := range []int64{1_000, 10_000} {
		b.Run(fmt.Sprint("limit=", limit), func(b *testing.B) {
			for b.Loop() {
				list, err := measureBatches(b.Context(), []int64{limit}, []int{4}, time.Second)
				redistest.Must(b, err)
				for _, m := range list {
					kind := "fixed"
					if m.auto {
						kind = "auto"
					}
					b.ReportMetric(m.steady.perRequest(), kind+"-calls/request")
					b.ReportMetric(m.stranded(), kind+"-stranded")
				}
			}
		})
	}
}
