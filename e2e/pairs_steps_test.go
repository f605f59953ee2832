//go:build check

package e2e

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
)

// This file has steps of features that send requests of their own clients, in the middle of
// the others.

// logIn sends requests of a client that nothing else is about, and one that forgives them.
func (p *pairRun) logIn() {
	p.t.Helper()
	c := pairClient{key: "regretful", group: "regretful"}
	logins := []bool{false, false, true}
	if p.bounds().shared {
		// What counts in the bucket that new clients share stays.
		logins = []bool{true}
	}
	for _, login := range logins {
		if a := p.ask(pairRequest{pairClient: c, login: login}); a.err != nil {
			p.complain("a client that logs in: %v", a.err)
		}
	}
	if p.bounds().faults || !p.countsInRedis() {
		return
	}
	p.await("the login forgives", func() error {
		books := pairBooks{}
		status, _ := adminStatus(p.caddy)
		for _, store := range status.Stores {
			books[store.Name] = map[pairBucket]heldBucket{}
			bucket := c.bucket(zoneAPI)
			if err := p.readBucket(books, store.Name, bucket, "key="+c.key); err != nil || books[store.Name][bucket].used != 0 {
				return fmt.Errorf("in store %s: %v, %w", store.Name, books[store.Name][bucket], err)
			}
		}
		return nil
	})
}

// blockedClient is the client that block blocks.
var blockedClient = pairClient{key: "trespasser", group: "trespasser"}

// block blocks a client in all stores.
func (p *pairRun) block() {
	p.t.Helper()
	status, _ := adminStatus(p.caddy)
	for _, store := range status.Stores {
		code, text := p.caddy.AdminCall(http.MethodPost, "/rate_limit/blocks/"+zoneAPI+"?for=1h&key="+blockedClient.key+"&store="+store.Name, "", "")
		must(p.t, "block: "+text, want("status", code, http.StatusOK))
	}
}

// staysBlocked requires that the client is blocked, unless the store that knows it is not in use.
func (p *pairRun) staysBlocked() {
	p.t.Helper()
	if !p.countsInRedis() {
		return
	}
	if a := p.ask(pairRequest{pairClient: blockedClient}); a.status != http.StatusTooManyRequests {
		p.complain("a blocked client gets %d, %v, %v", a.status, a.err, a.header)
	}
}

// isExact reports whether what a client gets can be foreseen: its store counts in Redis, no
// server is down, and the client has a bucket of its own.
func (p *pairRun) isExact() bool {
	return p.countsInRedis() && !p.bounds().faults && !p.bounds().shared
}

// tell records an answer that the store has counted.
func (p *pairRun) tell(a pairAnswer) {
	a.healthy = true
	p.answers = append(p.answers, a)
}

// stranger adds a client to those whose buckets are read.
func (p *pairRun) stranger(c pairClient) pairClient {
	if !slices.Contains(p.strangers, c) {
		p.strangers = append(p.strangers, c)
	}
	return c
}

// leave sends requests whose client leaves before the backend answers. They are charged.
func (p *pairRun) leave() {
	p.t.Helper()
	if !p.isExact() {
		return
	}
	c := p.stranger(pairClient{key: "impatient", group: "impatient"})
	for range 3 {
		select {
		case <-p.reached: // by the last request, which a reload ended at that moment
		default:
		}
		ctx, leave := context.WithCancel(p.t.Context())
		req, err := p.request(ctx, "/left", pairRequest{pairClient: c})
		must(p.t, "request", err)
		ended := make(chan error, 1)
		go func() {
			resp, err := p.client.Do(req)
			if err == nil {
				_ = resp.Body.Close()
			}
			ended <- err
		}()
		select {
		case <-p.reached:
			leave()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				p.complain("a request of a client that has left ends with %v", err)
			}
			a := pairAnswer{pairRequest: pairRequest{pairClient: c}, status: http.StatusOK, life: p.life, outcome: map[string]string{}}
			for _, zone := range p.site().zonesOf() {
				a.outcome[zone] = "allowed"
			}
			p.tell(a)
		case err := <-ended:
			// The server that a reload ends closes connections whose requests no handler has seen.
			leave()
			if err == nil {
				p.complain("a request of a client that leaves is answered")
			}
		}
	}
}

// giveBack sends free requests, one after the other, of a client that has one event left: what one
// gives back is there for the next.
func (p *pairRun) giveBack() {
	p.t.Helper()
	if !p.isExact() {
		return
	}
	c := p.stranger(pairClient{key: "patient", group: "patient"})
	p.sendAll(c, p.capacity(&c, zoneAPI)-1)
	for i := range 8 {
		if a := p.ask(pairRequest{pairClient: c, free: true}); a.err != nil || a.status != http.StatusNotModified {
			p.complain("free request %d, after one that gave its event back, gets %d, %v, %v", i, a.status, a.err, a.header)
			return
		}
	}
}

// sendAll sends n requests at once, and returns how many are served.
func (p *pairRun) sendAll(c pairClient, n int64) (served int64) {
	p.t.Helper()
	var all sync.WaitGroup
	answers := make([]pairAnswer, n)
	for i := range answers {
		all.Go(func() { answers[i] = p.ask(pairRequest{pairClient: c}) })
	}
	all.Wait()
	for _, a := range answers {
		if p.tell(a); a.served() {
			served++
		}
	}
	return served
}

// favoured is the client of a grant.
var favoured = pairClient{key: "favoured", group: "favoured"}

const grantedEvents = 5

// useGrant grants events to a client in all stores, and sends more requests than it may.
func (p *pairRun) useGrant() {
	p.t.Helper()
	if !p.isExact() {
		return
	}
	p.stranger(favoured)
	status, _ := adminStatus(p.caddy)
	for _, store := range status.Stores {
		// Where a server does not answer in time, it may have the grant, which the next replaces.
		p.await("the grant is in the store", func() error {
			code, text := p.caddy.AdminCall(http.MethodPost, fmt.Sprintf("/rate_limit/grants/%s?events=%d&key=%s&store=%s", zoneAPI, grantedEvents, favoured.key, store.Name), "", "")
			if isTimeout(text) {
				return errors.New(text)
			}
			must(p.t, "grant: "+text, want("status", code, http.StatusOK))
			return nil
		})
	}
	may := p.capacity(&favoured, zoneAPI)
	if got := p.sendAll(favoured, may+3); got != may {
		p.complain("of a client with a grant %d are served, want %d", got, may)
	}
}

// valued is the client that has a limit of its own.
var valued = pairClient{key: "valued", group: "valued"}

const valuedLimit = 60

// setRules gives a client a limit of its own in all stores, and sets of the zone what the config says too.
func (p *pairRun) setRules() {
	p.t.Helper()
	set := func(path string) {
		p.await(path+" is set", func() error {
			code, text := p.caddy.AdminCall(http.MethodPost, "/rate_limit/"+path, "", "")
			if isTimeout(text) {
				return errors.New(text)
			}
			must(p.t, path+": "+text, want("status", code, http.StatusOK))
			return nil
		})
	}
	status, _ := adminStatus(p.caddy)
	for _, store := range status.Stores {
		set(fmt.Sprintf("limits/%s?events=%d&key=%s&store=%s", zoneAPI, valuedLimit, valued.key, store.Name))
	}
	set("zones/" + zoneAPI + "?enforce=100")
}

// useLimit sends more requests than the client's own limit admits. While servers are down, and later, the
// invariants of all clients say how many may pass.
func (p *pairRun) useLimit() {
	p.t.Helper()
	if p.bounds().shared || !p.countsInRedis() {
		return
	}
	isFirst := !slices.Contains(p.strangers, valued)
	p.stranger(valued)
	may := p.capacity(&valued, zoneAPI)
	if got := p.sendAll(valued, may+3); isFirst && p.isExact() && got != may {
		p.complain("of a client with a limit of its own %d are served, want %d", got, may)
	}
}

// overload sends a request that the backend refuses for an hour: until then no request of its client
// reaches the backend.
func (p *pairRun) overload() {
	p.t.Helper()
	if !p.isExact() {
		return
	}
	p.madeUp++
	name := fmt.Sprint("overloading-", p.madeUp)
	c := pairClient{key: name, group: name}
	if a := p.ask(pairRequest{pairClient: c, refused: true}); a.err != nil {
		p.complain("a client whom the backend refuses: %d, %v, %v", a.status, a.err, a.header)
	}
	p.await("the backend is obeyed", func() error {
		return want("status", p.ask(pairRequest{pairClient: c}).status, http.StatusTooManyRequests)
	})
}

// sendTwoKeys sends a request that names two clients: it is an error, and counts for neither.
func (p *pairRun) sendTwoKeys() {
	p.t.Helper()
	for range 3 {
		req, err := p.request(p.t.Context(), "/", pairRequest{pairClient: regulars[0]})
		must(p.t, "request", err)
		req.Header.Add("X-Key", regulars[1].key)
		resp, err := p.client.Do(req)
		if err != nil {
			continue // the server has ended for a reload
		}
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			p.complain("a request with two keys gets %d", resp.StatusCode)
		}
	}
}

// storeFalseReset stores the end of a window that no right clock can have stored, in a full bucket:
// its client is served, and counts from then on.
func (p *pairRun) storeFalseReset() {
	p.t.Helper()
	if !p.isExact() {
		return
	}
	c := pairClient{key: "belated", group: "belated"}
	if a := p.ask(pairRequest{pairClient: c, free: true}); a.err != nil {
		p.complain("a client with a new bucket: %v", a.err)
	}
	for _, shard := range p.shards {
		client := shard.Primary.Client()
		keys, err := client.Keys(p.t.Context(), "*"+c.key+"*").Result()
		must(p.t, "keys", err)
		for _, key := range keys {
			if client.HExists(p.t.Context(), key, "r").Val() {
				never := time.Now().AddDate(30, 0, 0).UnixMicro()
				must(p.t, "store", client.HSet(p.t.Context(), key, "c", 1000, "r", never).Err())
			}
		}
	}
	p.stranger(c)
	for range 3 {
		a := p.ask(pairRequest{pairClient: c})
		if p.tell(a); !a.served() {
			p.complain("a client whose bucket has a false reset gets %d, %v, %v", a.status, a.err, a.header)
		}
	}
}

// holdForTheDead makes a Caddy that has died hold an event in each bucket: nobody passes for it.
func (p *pairRun) holdForTheDead() {
	p.t.Helper()
	for _, shard := range p.shards {
		if !shard.Primary.Running() {
			continue
		}
		client := shard.Primary.Client()
		keys, err := client.Keys(p.t.Context(), "rl:*:"+zoneAPI+":*").Result()
		must(p.t, "keys", err)
		for _, key := range keys {
			if strings.HasSuffix(key, " held") {
				continue
			}
			until := float64(time.Now().Add(time.Minute).UnixMicro())
			must(p.t, "hold", client.Append(p.t.Context(), key+" held", string(packed(math.MaxUint32, 1, until))).Err())
		}
	}
}

// usagePath is where responses say what they cost.
const usagePath = "usage.total"

// usage is such a body, compressed.
var usage = func() []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	_, _ = io.WriteString(z, `{"text":"`+strings.Repeat("a", 1000)+`","usage":{"total":1}}`)
	_ = z.Close()
	return b.Bytes()
}()

// checkCosts verifies that the cost of every response was read, unless some have no body.
func (p *pairRun) checkCosts() {
	p.t.Helper()
	if p.has("reset_status") || p.has("clients leave") {
		return
	}
	_, text := p.caddy.AdminCall(http.MethodGet, "/metrics", "", "")
	m, err := caddyproc.ParseMetrics(text)
	must(p.t, "metrics", err)
	if n := m.Sum("caddy_rate_limit_unreadable_total", `option="cost"`); n != 0 {
		p.complain("the cost of %g responses was not read", n)
	}
}

// checkLowLimit verifies that of a client's requests with the low limit no more pass than that,
// whatever its other requests have spent.
func (p *pairRun) checkLowLimit() {
	p.t.Helper()
	type bucket struct {
		key  string
		life int
	}
	passed := map[bucket]int64{}
	for i := range p.answers {
		a := &p.answers[i]
		if !a.low || !a.served() || a.outcome[zoneAPI] == "error_allowed" {
			continue
		}
		// What is in memory is lost between its lives.
		b := bucket{a.key, 0}
		if a.life%2 == 1 {
			b.life = a.life
		}
		passed[b]++
	}
	bounds := p.bounds()
	most := lowLimit * bounds.limits * int64(len(p.books))
	if bounds.strangers || bounds.either {
		most *= 2
	}
	for b, n := range passed {
		if n > most+p.doubts().missing {
			p.complain("of %.30q in life %d %d pass whose limit is %d", b.key, b.life, n, lowLimit)
		}
	}
}
