package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const (
	// faultCaddys is how many Caddys serve while replies are lost.
	faultCaddys = 2
	// faultConnections is how many requests of a client there are at a time, and
	// faultPace how long each connection waits in between.
	faultConnections = 4
	faultPace        = 25 * time.Millisecond
	// calm is how long there is no fault at first, and at the end.
	calm = 500 * time.Millisecond
	// longestCharge is how long a charge can be on its way, when it shows nowhere:
	// charge_timeout and two seconds for the reply, and time for the next, which
	// has what came meanwhile.
	longestCharge = 3 * time.Second
)

// faultLimits are those under which nothing is forgotten while faults last, and
// nobody is refused.
func faultLimits() (all []limit) {
	for _, l := range limits() {
		if l.batched || l.algorithm == concurrency {
			continue
		}
		l.events, l.window, l.takes = 5000, 48*time.Hour, 0
		if l.burst > 0 {
			l.burst = l.events
		}
		all = append(all, l)
	}
	return all
}

// tryFaults tries the wanted faults, each under all limits at once.
func tryFaults(ctx context.Context, set settings, wanted *regexp.Regexp) (all []*loss, err error) {
	for _, f := range faults() {
		if ctx.Err() != nil || !wanted.MatchString(f.name) {
			continue
		}
		losses, failed := f.try(ctx, set, faultLimits())
		err = errors.Join(err, failed)
		for _, l := range losses {
			fmt.Println(l)
			for _, text := range l.breaches() {
				fmt.Println("EXCEEDED", text)
				err = errors.Join(err, errors.New(text))
			}
		}
		all = append(all, losses...)
	}
	return all, err
}

// try lets a fault happen while a client of each limit is served.
func (f fault) try(ctx context.Context, set settings, limits []limit) (_ []*loss, err error) {
	shard, err := redistest.LaunchShard(1)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, shard.Stop()) }()
	proxy, err := redistest.NewProxy(shard.Primary.Addr())
	if err != nil {
		return nil, err
	}
	defer proxy.Close()
	// Each limit has a store, so that metrics tell them apart.
	stores, handlers := "", ""
	for _, l := range limits {
		stores += fmt.Sprintf("store %s redis {\nshard a {\nprimary %s\nreplica %s\n}\nkey_prefix %s\ncheck_timeout 250ms\non_error deny\n}\n",
			l.zone(), proxy.Addr(), shard.Replicas[0].Addr(), l.zone())
		handlers += "rate_limit {\nstore " + l.zone() + "\n" + l.caddyfile() + "}\n"
	}
	sites, err := startSites(faultCaddys, set.caddy, filepath.Join(set.dir, f.name), stores, handlers, "respond ok")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, stopSites(sites)) }()

	sending, end := context.WithCancel(ctx)
	losses, running := make([]*loss, len(limits)), sync.WaitGroup{}
	for i, l := range limits {
		running.Go(func() {
			t := &traffic{client: faultClient, zone: l.zone(), sites: sites, connections: faultConnections, pace: faultPace, rest: faultPace}
			losses[i] = newLoss(f, l, t.run(sending))
		})
	}
	pause(ctx, calm)
	err = f.inflict(ctx, proxy)
	pause(ctx, calm)
	end()
	running.Wait()
	pause(ctx, longestCharge)
	if err != nil {
		return nil, err
	}
	for _, l := range losses {
		if err := l.look(ctx, sites); err != nil {
			return nil, err
		}
	}
	return losses, nil
}

// faultClient is the client that is served under faults.
const faultClient = "client"

func newLoss(f fault, l limit, seen []response) *loss {
	served, refused := count(seen, (*response).isAdmitted), count(seen, (*response).isRefused)
	return &loss{fault: f.name, limit: l, served: served, refused: refused, unanswered: int64(len(seen)) - served - refused}
}

const (
	// countPatience bounds how long charges may take whose replies were lost.
	countPatience = time.Minute
	countPace     = 50 * time.Millisecond
)

// look waits until nothing is in flight, unsent or uncertain, and reads what was
// counted.
func (l *loss) look(ctx context.Context, sites []*site) error {
	for deadline, settled := time.Now().Add(countPatience), false; ; {
		waiting, used := int64(0), int64(0)
		for _, s := range sites {
			b, err := s.bucket(ctx, l.limit, faultClient)
			if err != nil {
				return err
			}
			waiting += b.waiting
			used = max(used, b.used)
		}
		// What was on its way may have arrived after its bucket was read.
		if settled && waiting == 0 {
			l.counted = used
			break
		}
		settled = waiting == 0
		if time.Now().After(deadline) {
			return fmt.Errorf("%s, %s: %d charges are still on their way", l.fault, l.limit, waiting)
		}
		pause(ctx, countPace)
	}
	for _, s := range sites {
		m, err := s.Metrics()
		if err != nil {
			return err
		}
		store := `store="` + l.limit.zone() + `"`
		l.uncertain += int64(m.Sum("caddy_rate_limit_undelivered_total", store, `outcome="uncertain"`))
		l.notRefunded += int64(m.Sum("caddy_rate_limit_undelivered_total", store, `operation="refund"`))
		if l.limit.charge == before {
			for _, kind := range []string{"timeout", "connection"} {
				l.untold += int64(m.Sum("caddy_rate_limit_store_errors_total", store, `kind="`+kind+`"`))
			}
		}
	}
	return nil
}

// bucket is what the primary holds of a client, and what a Caddy has not told it.
type bucket struct{ used, waiting int64 }

// bucket asks the admin API for it.
func (s *site) bucket(ctx context.Context, l limit, client string) (b bucket, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet,
		"http://"+s.Admin+"/rate_limit/buckets/"+l.zone()+"?key="+url.QueryEscape(client)+"&store="+l.zone(), nil)
	if err != nil {
		return b, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return b, fmt.Errorf("read a bucket: %w", err)
	}
	defer resp.Body.Close()
	var answer struct {
		Error   string `json:"error"`
		Buckets []struct {
			Servers []struct {
				Role  string `json:"role"`
				Error string `json:"error"`
				State *struct {
					Used int64 `json:"used"`
				} `json:"state"`
			} `json:"servers"`
			Ledger *struct {
				InFlight int64 `json:"in_flight"`
				Unsent   int64 `json:"unsent"`
			} `json:"ledger"`
		} `json:"buckets"`
	}
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return b, fmt.Errorf("read a bucket: %w", err)
	}
	if answer.Error != "" || len(answer.Buckets) != 1 {
		return b, fmt.Errorf("read a bucket: %d of them, error %q", len(answer.Buckets), answer.Error)
	}
	for _, server := range answer.Buckets[0].Servers {
		if server.Role != "primary" {
			continue
		}
		if server.Error != "" {
			// It is asked again.
			b.waiting++
		}
		if server.State != nil {
			b.used = server.State.Used
		}
	}
	if of := answer.Buckets[0].Ledger; of != nil {
		b.waiting += of.InFlight + of.Unsent
	}
	return b, nil
}
