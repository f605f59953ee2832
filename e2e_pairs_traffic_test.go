package shardlimit_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// pairClient is a client and what its requests say of it.
type pairClient struct {
	key, group string
	// modest ones stay below every limit, so nothing may refuse them.
	modest, staff bool
}

// regulars come again and again, with keys that are long, binary, or look like
// something else.
var regulars = []pairClient{
	{key: "alice", group: "calm", modest: true},
	{key: "{braces}:and:colons:", group: "calm", modest: true},
	{key: "{http.request.uri}", group: "calm", modest: true, staff: true},
	{key: strings.Repeat("long", 1000), group: "calm", modest: true},
	{key: "binary \xff\xfe\x80\xc3", group: "calm", modest: true},
	{key: "rl:1:api:fixed_window-3600s:alice", group: "calm", modest: true},
	{key: "greedy", group: "busy"},
	{key: "greedy too", group: "busy", staff: true},
	{key: "greedy \xc3(" + strings.Repeat("{", 100), group: "busy"},
	{key: "greedy " + strings.Repeat("\xf0long", 2000), group: "busy", staff: true},
}

const (
	// pairWorkers is how many requests run at the same time.
	pairWorkers = 24
	// pairSlack is how many requests may begin after the instant at which something
	// is to happen, before it has.
	pairSlack = 40
)

// request is one to come.
type pairRequest struct {
	pairClient
	// free ones get a status that costs nothing.
	free bool
}

// pairAnswer is what became of it.
type pairAnswer struct {
	pairRequest
	err    error
	status int
	// life is that of the store under the config that answered; its parity tells
	// where that counts.
	life int
	// outcome is what zones decided, if they let it pass.
	outcome map[string]string
	header  http.Header
	// healthy is set if no server was away while it ran.
	healthy bool
}

func (a *pairAnswer) served() bool { return a.err == nil && a.status == http.StatusOK }

// mix returns requests of the regulars and of made-up clients, in random order.
func (p *pairRun) mix(modest, greedy, madeUp int) (all []pairRequest) {
	for _, c := range regulars {
		n := greedy
		if c.modest {
			n = modest
		}
		for range n {
			all = append(all, pairRequest{c, p.rng.IntN(8) == 0})
		}
	}
	for range madeUp {
		p.madeUp++
		key := fmt.Sprint("made-up-", p.madeUp)
		if p.rng.IntN(4) == 0 {
			key += strings.Repeat("\xfflong", 400)
		}
		c := pairClient{key: key, group: "once"}
		p.strangers = append(p.strangers, c)
		all = append(all, pairRequest{pairClient: c})
	}
	p.rng.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all
}

// step is something that happens once as many requests have been answered.
type pairStep struct {
	after int
	do    func()
}

// send makes requests, many at a time, while steps are taken in order, and adds
// what is answered. healthy says that no server is away meanwhile.
func (p *pairRun) send(requests []pairRequest, steps []pairStep, healthy bool) {
	p.t.Helper()
	var (
		mu             sync.Mutex
		changed        = sync.NewCond(&mu)
		begun, ended   int
		taken          int
		workers        sync.WaitGroup
		answers        []pairAnswer
		isAllowedBegin = func() bool {
			return taken == len(steps) || begun < steps[taken].after+pairSlack
		}
	)
	// What fails in a step ends the test, but not before the requests have ended.
	defer func() {
		mu.Lock()
		if p.t.Failed() {
			begun = len(requests)
		}
		taken = len(steps)
		changed.Broadcast()
		mu.Unlock()
		workers.Wait()
		p.answers = append(p.answers, answers...)
	}()
	for range pairWorkers {
		workers.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			for {
				for begun < len(requests) && !isAllowedBegin() {
					changed.Wait()
				}
				if begun == len(requests) {
					return
				}
				r := requests[begun]
				begun++
				mu.Unlock()
				a := p.ask(r)
				a.healthy = healthy
				mu.Lock()
				answers = append(answers, a)
				ended++
				changed.Broadcast()
			}
		})
	}
	for _, step := range steps {
		mu.Lock()
		for ended < min(step.after, len(requests)) {
			changed.Wait()
		}
		mu.Unlock()
		step.do()
		mu.Lock()
		taken++
		changed.Broadcast()
		mu.Unlock()
	}
}

// ask makes one request. While a server of net/http is shut down it hangs up on
// requests that it reads, before anybody sees them; a client then asks again.
func (p *pairRun) ask(r pairRequest) pairAnswer {
	for {
		a := p.askOnce(r)
		if a.status != 0 || p.hangUps.Add(1) > pairWorkers*p.loads.Load() {
			return a
		}
	}
}

func (p *pairRun) askOnce(r pairRequest) pairAnswer {
	a := pairAnswer{pairRequest: r}
	path := "/"
	if r.free {
		path = "/free"
	}
	req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, "http://pair"+path, nil)
	if err != nil {
		a.err = err
		return a
	}
	req.Header.Set("X-Key", r.key)
	req.Header.Set("X-Group", r.group)
	if r.staff {
		req.Header.Set("X-Staff", "yes")
	}
	resp, err := p.client.Do(req)
	if err != nil {
		a.err = err
		return a
	}
	defer resp.Body.Close()
	if _, a.err = io.Copy(io.Discard, resp.Body); a.err != nil {
		return a
	}
	a.status, a.header = resp.StatusCode, resp.Header
	a.life, _ = strconv.Atoi(resp.Header.Get("X-Life"))
	a.outcome = map[string]string{}
	for _, zone := range []string{zoneAPI, zoneGroup, zoneInner} {
		a.outcome[zone] = resp.Header.Get("X-Outcome-" + zone)
	}
	switch {
	case a.status == http.StatusTooManyRequests:
	case a.status == http.StatusOK && !a.free, a.status == http.StatusNotModified && a.free:
	default:
		a.err = errors.New("no answer of the site")
	}
	return a
}

// startBackend starts what the site limits the way to. It holds each request for
// a moment, and some longer.
func (p *pairRun) startBackend() {
	var n atomic.Int64
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		time.Sleep(time.Duration(n.Add(1)%9) * time.Millisecond)
		if r.URL.Path == "/free" {
			w.WriteHeader(http.StatusNotModified)
		}
	}))
	p.t.Cleanup(server.Close)
	p.backend = server
	// Caddy hands a Unix socket on when the config changes. Of connections to a
	// port the system resets those that wait to be accepted then.
	p.client = &http.Client{
		Transport: &http.Transport{
			DisableCompression: true, MaxIdleConnsPerHost: pairWorkers,
			DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
				return new(net.Dialer).DialContext(ctx, "unix", p.socket)
			},
		},
		Timeout: pairPatience,
	}
	p.t.Cleanup(p.client.CloseIdleConnections)
}
