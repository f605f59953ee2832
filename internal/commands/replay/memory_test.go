//go:build check

package replay_test

import (
	"io"
	"runtime"
	"testing"

	"github.com/shardlimit/caddy-shardlimit/internal/commands/replay"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// watched looks at the heap as its stream is read.
type watched struct {
	io.Reader
	read, next, every int64
	heaps             []uint64
}

func (w *watched) Read(b []byte) (int, error) {
	n, err := w.Reader.Read(b)
	if w.read += int64(n); w.read >= w.next {
		w.next += w.every
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		w.heaps = append(w.heaps, m.HeapAlloc)
	}
	return n, err
}

// TestMemoryDoesNotGrowWithTheLog: beyond the clients, hours and buckets that are remembered, nothing is
// kept of a line. The second half of a long log, all of new clients, adds nothing to the heap.
func TestMemoryDoesNotGrowWithTheLog(t *testing.T) {
	const lines, most = 200_000, 2000
	stream := &watched{Reader: &traffic{lines: lines, clients: 1 << 24, perSecond: 20_000}, every: 8 << 20}
	a, err := rerun(t, twoZones, replay.Config{Logs: []string{"-"}, Stdin: stream, Suggest: -1, MostClients: most, MostBuckets: 5000})
	redistest.Must(t, err)
	if a.Requests != lines || a.Zones[0].Clients != most {
		t.Errorf("%d requests and %d clients of zone %s", a.Requests, a.Zones[0].Clients, a.Zones[0].Name)
	}
	t.Log(a.Notes)
	if len(a.Notes) < 2 {
		t.Errorf("the notes do not say what was dropped: %q", a.Notes)
	}
	t.Logf("heap after each %d MB: %v", stream.every>>20, stream.heaps)
	n := len(stream.heaps)
	middle, end := largest(stream.heaps[n/4:n/2]), largest(stream.heaps[n-n/4:])
	if end > middle+middle/4 {
		t.Errorf("the heap has grown from %d to %d bytes in the second half of the log", middle, end)
	}
}

func largest(heaps []uint64) (most uint64) {
	for _, heap := range heaps {
		most = max(most, heap)
	}
	return most
}
