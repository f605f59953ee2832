package main

import (
	"fmt"
	"net"
	"net/http"
	"sync"
	"time"
)

// backend is what Caddy limits the way to. It takes as long for each request as
// the zone in its path says, and counts what runs at the same time.
type backend struct {
	server *http.Server
	addr   string

	mu      sync.Mutex
	running map[string]int64
	most    map[string]int64
}

// startBackend starts one for the zones of limits.
func startBackend(limits []limit) (*backend, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, fmt.Errorf("start the backend: %w", err)
	}
	b := &backend{addr: listener.Addr().String(), running: map[string]int64{}, most: map[string]int64{}}
	takes := map[string]time.Duration{}
	for _, l := range limits {
		takes["/"+l.zone()] = l.takes
	}
	b.server = &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client := r.Header.Get(clientHeader)
		b.add(client, 1)
		time.Sleep(takes[r.URL.Path])
		b.add(client, -1)
		w.WriteHeader(http.StatusOK)
	})}
	go func() { _ = b.server.Serve(listener) }()
	return b, nil
}

func (b *backend) add(client string, n int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.running[client] += n
	b.most[client] = max(b.most[client], b.running[client])
}

// peak is how many requests of a client ran at the same time at most.
func (b *backend) peak(client string) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.most[client]
}

func (b *backend) stop() { _ = b.server.Close() }
