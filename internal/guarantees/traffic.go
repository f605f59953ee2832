package main

import (
	"context"
	"io"
	"math/rand/v2"
	"net/http"
	"strconv"
	"sync"
	"time"
)

// traffic is what one client sends.
type traffic struct {
	client, zone string
	sites        []*site
	// connections is how many requests it makes at a time. Where there are fewer
	// than Caddys, they go from one to the next.
	connections int
	// pace is how long a connection waits after an answer, rest after one that
	// does not admit. They vary by half.
	pace, rest time.Duration
}

// requestPatience bounds a request; nothing should take as long.
const requestPatience = time.Minute

// run sends requests until ctx ends, and returns what came back.
func (t *traffic) run(ctx context.Context) []response {
	transport := &http.Transport{DisableCompression: true, MaxIdleConnsPerHost: t.connections}
	client := &http.Client{Transport: transport, Timeout: requestPatience}
	defer transport.CloseIdleConnections()
	var mu sync.Mutex
	var all []response
	var running sync.WaitGroup
	begin := make(chan struct{})
	for c := range t.connections {
		running.Go(func() {
			<-begin // all at once
			var mine []response
			for n := c; ctx.Err() == nil; {
				r := t.ask(client, n%len(t.sites))
				mine = append(mine, r)
				wait := t.pace
				if !r.isAdmitted() {
					wait = t.rest
				}
				if wait > 0 {
					time.Sleep(wait/2 + rand.N(wait))
				}
				if t.connections < len(t.sites) {
					n++
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, mine...)
		})
	}
	close(begin)
	running.Wait()
	return all
}

func (t *traffic) ask(client *http.Client, caddy int) (r response) {
	r.caddy, r.begun = caddy, time.Now()
	defer func() { r.ended = time.Now() }()
	req, err := http.NewRequest(http.MethodGet, "http://"+t.sites[caddy].Addr+"/"+t.zone, nil)
	if err != nil {
		return r
	}
	req.Header.Set(clientHeader, t.client)
	resp, err := client.Do(req)
	if err != nil {
		return r
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil {
		return r
	}
	r.status = resp.StatusCode
	r.reset, _ = strconv.ParseInt(resp.Header.Get("X-RateLimit-Reset"), 10, 64)
	return r
}
