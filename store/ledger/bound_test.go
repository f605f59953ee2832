package ledger

import (
	"errors"
	"fmt"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestBooksAreBounded, by forgetting what is known.
func TestBooksAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most, clients = 10_000, 40_000
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{MaxBuckets: most, OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) {
			t.Errorf("%d were lost: %v", n, err)
		}})
		for i := range clients {
			r := requestOf(fmt.Sprint(i), 10)
			l.ChargeDetached([]store.Request{r})
			if i%100 == 0 {
				time.Sleep(10 * time.Millisecond)
			}
		}
		time.Sleep(time.Second)
		synctest.Wait()
		if n := l.books.Len(); n < most/2 || n > most+pageCount {
			t.Errorf("%d buckets are remembered, the bound is %d", n, most)
		}
		l.Leave()
	})
}

// TestOldEntriesGo without a bound being reached.
func TestOldEntriesGo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSimulation(1)
		l := New(NewBooks(nil), s, Options{})
		for i := range 50_000 {
			r := requestOf(fmt.Sprint(i), 10)
			l.ChargeDetached([]store.Request{r})
			if i%100 == 0 {
				time.Sleep(time.Second)
				synctest.Wait()
			}
		}
		// Those of the last minute, and as many that nobody came across yet.
		if n := l.books.Len(); n > 3*60*100 {
			t.Errorf("%d buckets are remembered, though only 6,000 say something", n)
		}
		time.Sleep(time.Second)
		synctest.Wait()
		l.Leave()
	})
}

// TestBoundInAnOutage: what has to be dropped then is reported.
func TestBoundInAnOutage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most, clients = 1000, 5000
		s := newSimulation(1)
		lost := int64(0)
		l := New(NewBooks(nil), s, Options{MaxBuckets: most, OnUndelivered: func(_ string, _ algorithm.Operation, n int64, err error) {
			if !errors.Is(err, errNoRoom) {
				t.Errorf("%d were lost: %v", n, err)
			}
			lost += n
		}})
		s.down = true
		for i := range clients {
			l.ChargeDetached([]store.Request{requestOf(fmt.Sprint(i), 10)})
			if i%100 == 0 {
				time.Sleep(100 * time.Millisecond)
			}
		}
		if n := l.books.Len(); n > most+pageCount+100 {
			t.Errorf("%d buckets are remembered, the bound is %d", n, most)
		}
		s.mu.Lock()
		s.down = false
		s.mu.Unlock()
		time.Sleep(20 * time.Second)
		synctest.Wait()
		spent := int64(0)
		for i := range clients {
			spent += s.used(requestOf(fmt.Sprint(i), 10))
		}
		if spent+lost != clients || spent < most/2 {
			t.Errorf("of %d charges %d arrived and %d are reported as lost", clients, spent, lost)
		}
		l.Leave()
	})
}

// TestMemoryPerBucket measures what a bucket takes that was charged once.
func TestMemoryPerBucket(t *testing.T) {
	const buckets, most = 100_000, 300
	s := newSimulation(1)
	l := New(NewBooks(nil), s, Options{})
	requests := make([]store.Request, buckets)
	for i := range requests {
		requests[i] = requestOf(fmt.Sprintf("2001:db8:1234:%x::/64", i), 10)
		requests[i].ID = ""
	}
	before := heap()
	for i := range requests {
		r := requests[i]
		e := l.enter(&r, 1)
		e.hear(&r, &store.State{Now: 1, Content: store.Content{1, int64(time.Hour)}}, 1, 1)
		e.page.mu.Unlock()
	}
	used := (heap() - before) / buckets
	runtime.KeepAlive(requests)
	if t.Logf("%d bytes", used); used > most {
		t.Errorf("a bucket takes %d bytes, want at most %d", used, most)
	}
	runtime.KeepAlive(l)
	l.Leave()
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
