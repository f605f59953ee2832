package main

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// pace is how often each client sends a request.
const pace = 25 * time.Millisecond

// crew is how many clients of each role there are.
var crew = map[role]int{regular: 4, greedy: 1, late: 1, bystander: 2}

// traffic is all clients of a Caddy.
type traffic struct {
	clients []*client
	url     string

	ctx     context.Context
	end     context.CancelFunc
	running sync.WaitGroup
}

// recruit gives clients their roles: mine belong to the shard that the fault
// happens to, others to another one. Greedy ones have so many events.
func recruit(url string, mine, others []string, events int64) (*traffic, error) {
	t := &traffic{url: url}
	t.ctx, t.end = context.WithCancel(context.Background())
	for _, r := range []role{regular, greedy, late, bystander} {
		names := &mine
		if r == bystander {
			names = &others
		}
		if len(*names) < crew[r] {
			return nil, fmt.Errorf("there are %d clients for %d", len(*names), crew[r])
		}
		for _, name := range (*names)[:crew[r]] {
			c := &client{name: name, role: r, events: plenty}
			if r == greedy {
				c.events = events
			}
			t.clients = append(t.clients, c)
		}
		*names = (*names)[crew[r]:]
	}
	return t, nil
}

// start makes those clients send requests whose role it is.
func (t *traffic) start(isOne func(role) bool) {
	for _, c := range t.only(isOne) {
		t.running.Go(func() { c.run(t.ctx, t.url, pace) })
	}
}

// stop ends it once all requests are answered.
func (t *traffic) stop() {
	t.end()
	t.running.Wait()
}

// only are the clients whose role it is.
func (t *traffic) only(isOne func(role) bool) []*client { return those(t.clients, isOne) }

func those(clients []*client, isOne func(role) bool) (some []*client) {
	for _, c := range clients {
		if isOne(c.role) {
			some = append(some, c)
		}
	}
	return some
}

// served is how many requests of clients have been let through.
func served(clients []*client) (n int64) {
	for _, c := range clients {
		n += c.served()
	}
	return n
}
