package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

const (
	// deliverTimeout bounds the time until what waits has been delivered.
	deliverTimeout = time.Minute
	// Memory may have grown by so much, and goroutines, since all was in use.
	mostGrowth  = 1.5
	spareMemory = 30e6
	spareRoutes = 200
)

// account is what became of a zone's requests.
type account struct {
	zone           string
	served, counts int64
	// undelivered is how many charges may not have counted, unanswered how many
	// takes may have, though nothing was served for them.
	undelivered, unanswered int64
	// inBatches is set if one of these may be about any number of events.
	inBatches bool
}

// isBalanced tells whether everything that was served was counted, and nothing
// else, but for what is known to be in doubt.
func (a account) isBalanced() bool {
	return a.served <= a.counts+a.undelivered+a.unanswered && (a.counts <= a.served+a.unanswered || a.inBatches && a.unanswered > 0)
}

// balance compares the books, once all that waits has been delivered, and what
// the Caddys need with what they needed early.
func balance(ctx context.Context, w *world, all sites, l *load, early need) error {
	errs := l.failed
	var accounts []account
	for deadline := time.Now().Add(deliverTimeout); ; time.Sleep(time.Second) {
		var err error
		if accounts, err = open(ctx, w, all, l); err == nil && areBalanced(accounts) {
			break
		}
		if time.Now().After(deadline) {
			if err != nil {
				return err
			}
			break
		}
	}
	late, err := all.need()
	if err != nil {
		return err
	}
	for path, statuses := range l.statuses {
		fmt.Printf("/%s: %v\n", path, statuses)
	}
	for _, a := range accounts {
		fmt.Printf("%-7s served %d, counted %d, of %d charges undelivered and %d takes unanswered\n", a.zone, a.served, a.counts, a.undelivered, a.unanswered)
		if !a.isBalanced() {
			errs = append(errs, fmt.Errorf("the books of %s do not balance", a.zone))
		}
	}
	fmt.Printf("memory of both Caddys: %.1f MB early, %.1f MB late; goroutines: %.0f early, %.0f late\n",
		early.memory/1e6, late.memory/1e6, early.goroutines, late.goroutines)
	if late.memory > mostGrowth*early.memory+spareMemory || late.goroutines > mostGrowth*early.goroutines+spareRoutes {
		errs = append(errs, errors.New("memory or goroutines have grown"))
	}
	for _, s := range all {
		if text := s.Logs.String(); strings.Contains(text, "panic") || strings.Contains(text, "DATA RACE") {
			errs = append(errs, fmt.Errorf("a panic or a data race:\n%s", text))
		}
	}
	if errors.Join(errs...) == nil {
		fmt.Println("the books balance")
	}
	return errors.Join(errs...)
}

func areBalanced(accounts []account) bool {
	for _, a := range accounts {
		if !a.isBalanced() {
			return false
		}
	}
	return true
}

// open opens the books. What could not be delivered is not known by zone, so
// that each zone's may have been all of it.
func open(ctx context.Context, w *world, all sites, l *load) ([]account, error) {
	var undelivered, unanswered float64
	for _, s := range all {
		m, err := s.Metrics()
		if err != nil {
			return nil, err
		}
		// Expired ones are of the zones with short windows.
		for _, outcome := range []string{`outcome="lost"`, `outcome="uncertain"`} {
			undelivered += m.Sum("caddy_rate_limit_undelivered_total", `operation="charge"`, outcome)
		}
		unanswered += m.Sum("caddy_rate_limit_store_errors_total")
	}
	var accounts []account
	for _, zone := range counted {
		a := account{zone: zone, served: l.statuses[zone][http.StatusOK], undelivered: int64(undelivered), inBatches: zone == "batch"}
		if zone == "before" || zone == "batch" {
			a.unanswered = int64(unanswered)
		}
		for _, server := range w.servers() {
			n, err := countsIn(ctx, server, zone)
			if err != nil {
				return nil, err
			}
			a.counts += n
		}
		accounts = append(accounts, a)
	}
	return accounts, nil
}

// countsIn is what a primary counts in a zone, 0 for a replica.
func countsIn(ctx context.Context, server *redistest.Server, zone string) (total int64, err error) {
	info, err := server.Info("replication")
	if err != nil || info["role"] != "master" {
		return 0, err
	}
	keys, err := server.Client().Keys(ctx, "rl:*:"+zone+":*").Result()
	if err != nil {
		return 0, fmt.Errorf("list buckets: %w", err)
	}
	for _, key := range keys {
		text, err := server.Client().HGet(ctx, key, "c").Result()
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", key, err)
		}
		n, err := strconv.ParseInt(text, 10, 64)
		if err != nil {
			return 0, fmt.Errorf("read %s: %w", key, err)
		}
		total += n
	}
	return total, nil
}
