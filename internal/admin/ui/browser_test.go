package ui_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"image/color"
	"image/png"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/shardlimit/caddy-shardlimit/internal/admin/ui"
	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

var pictures = flag.String("ui.pictures", "", "write the pictures of the page into this directory, such as docs/img")

// site is a Caddy under load, with its page.
type site struct {
	caddy *caddyproc.Process
	// addr is where the site listens, page the URL of the page.
	addr, page string
	replica    *redistest.Server
}

const siteConfig = `{
	admin unix/%s
	persist_config off
	rate_limit {
		store redis {
			shard a {
				primary %s
				replica %s
			}
			shard b {
				primary %s
				replica %s
			}
			# On a busy machine on_error must not admit a client that is full.
			check_timeout 30s
		}
	}
}
http://%s {
	rate_limit {
		zone api {
			key {header.X-Key}
			events 40
			window %s
		}
		zone login {
			match {
				path /login
			}
			key {header.X-Key} {client_ip}
			events 1000
			window 1m
			algorithm gcra
		}
	}
	respond ok
}
`

// startSite starts Redis, Caddy and the page's server, as users do.
func startSite(t *testing.T, window string) *site {
	t.Helper()
	dir, err := os.MkdirTemp("", "ui") // short enough for a socket
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	binary, err := caddyproc.Build(dir)
	must(t, err)
	a, b := redistest.StartShard(t, 1), redistest.StartShard(t, 1)
	port, release, err := process.ReservePort()
	must(t, err)
	t.Cleanup(func() { _ = release() })
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	socket := filepath.Join(dir, "admin.sock")
	config := fmt.Sprintf(siteConfig, socket, a.Primary.Addr(), a.Replicas[0].Addr(), b.Primary.Addr(), b.Replicas[0].Addr(), addr, window)
	s := &site{addr: addr, replica: a.Replicas[0]}
	s.caddy, err = caddyproc.Start(binary, filepath.Join(dir, "site"), config, io.Discard, s.addr)
	must(t, err)
	t.Cleanup(s.caddy.Stop)

	server := exec.Command(binary, "rate-limit", "ui", "--listen", "127.0.0.1:0", "--address", "unix/"+socket)
	process.EndWithParent(server)
	out, err := server.StdoutPipe()
	must(t, err)
	must(t, server.Start())
	t.Cleanup(func() {
		_ = server.Process.Signal(syscall.SIGINT)
		if err := server.Wait(); err != nil {
			t.Errorf("the page's server ended with %v", err)
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	must(t, err)
	s.page = strings.TrimSpace(line)
	return s
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// ask sends a request as a client, and returns the status.
func (s *site) ask(path, client string) (int, error) {
	r, err := http.NewRequest(http.MethodGet, "http://"+s.addr+path, nil)
	if err != nil {
		return 0, err
	}
	r.Header.Set("X-Key", client)
	resp, err := http.DefaultClient.Do(r)
	if err != nil {
		return 0, err
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	return resp.StatusCode, resp.Body.Close()
}

// load sends requests until stop is called: half of them of most.
func (s *site) load(t *testing.T, most string) (stop func()) {
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; ctx.Err() == nil; n++ {
			client, path := fmt.Sprintf("client-%d", n%97), "/"
			if n%2 == 0 {
				client = most
			}
			if n%5 == 1 {
				path = "/login"
			}
			if _, err := s.ask(path, client); err != nil {
				t.Errorf("load: %v", err)
				return
			}
			time.Sleep(4 * time.Millisecond)
		}
	})
	return func() {
		cancel()
		wg.Wait()
	}
}

// greedy is a client that asks too much; its key would be markup.
const greedy = "greedy<b onload=x>&\"'"

// browser is a tab with the complaints about its page.
type browser struct {
	t    *testing.T
	ctx  context.Context
	page string
	mu   sync.Mutex
	// complaints are console errors, exceptions, and requests that leave.
	complaints []string
}

func startBrowser(t *testing.T, page string) *browser {
	t.Helper()
	path, err := process.Find("chromium")
	if err != nil {
		t.Fatalf("the page is tested in a browser: %v", err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.Flag("host-resolver-rules", "MAP *.example 127.0.0.1"), chromedp.UserDataDir(t.TempDir()))
	allocator, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	t.Cleanup(cancel)
	b := &browser{t: t, page: page}
	b.ctx, cancel = chromedp.NewContext(allocator, chromedp.WithListener(b.hear))
	t.Cleanup(cancel)
	return b
}

func (b *browser) hear(event any) {
	complaint := ""
	switch e := event.(type) {
	case *runtime.EventExceptionThrown:
		complaint = "exception: " + e.ExceptionDetails.Text
	case *runtime.EventConsoleAPICalled:
		complaint = fmt.Sprintf("console.%s", e.Type)
	case *log.EventEntryAdded:
		complaint = fmt.Sprintf("log: %s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL)
	case *network.EventRequestWillBeSent:
		if !strings.HasPrefix(e.Request.URL, b.page) && !strings.HasPrefix(e.Request.URL, "data:") {
			complaint = "request to " + e.Request.URL
		}
	}
	if complaint != "" {
		b.mu.Lock()
		b.complaints = append(b.complaints, complaint)
		b.mu.Unlock()
	}
}

// satisfied requires that there are no complaints so far, and clears them.
func (b *browser) satisfied(when string) {
	b.t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, complaint := range b.complaints {
		b.t.Errorf("%s: %s", when, complaint)
	}
	b.complaints = nil
}

func (b *browser) do(actions ...chromedp.Action[chromedp.Void]) {
	b.t.Helper()
	must(b.t, chromedp.Do(b.ctx, actions...))
}

// run evaluates an expression on the page.
func run[T any](b *browser, expression string) T {
	b.t.Helper()
	value, err := chromedp.Run(b.ctx, chromedp.Evaluate[T](expression))
	must(b.t, err)
	return value
}

// is reports whether an expression is true on the page.
func (b *browser) is(expression string) bool {
	b.t.Helper()
	// The element may not be there yet.
	return run[bool](b, "(() => { try { return Boolean("+expression+") } catch { return false } })()")
}

// waitTimeout is more than it takes to fill a chart for the picture.
const waitTimeout = 3 * time.Minute

// await waits until an expression is true on the page.
func (b *browser) await(what, expression string) {
	b.t.Helper()
	for deadline := time.Now().Add(waitTimeout); !b.is(expression); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: it does not come; the page is\n%s", what, run[string](b, "document.body.innerText"))
		}
	}
}

// TestPageInBrowser shows a live Caddy under load, and steers it.
func TestPageInBrowser(t *testing.T) {
	s := startSite(t, "1h")
	stop := s.load(t, greedy)
	b := startBrowser(t, s.page)
	b.do(chromedp.EmulateViewport(1200, 1250), chromedp.Navigate(s.page))
	for _, kind := range []string{"allowed", "refused"} {
		b.await("a chart of what was "+kind, `(document.querySelector('[data-zone=api] polyline.`+kind+`').getAttribute('points') || '').split(' ').filter(p => +p.split(',')[1] < 97).length > 4`)
	}
	b.await("the chart says what it shows", `/zone api .* now [0-9.]*[1-9][0-9.]* a second allowed and [0-9.]*[1-9][0-9.]* refused/.test(document.querySelector('[data-zone=api] svg').getAttribute('aria-label'))`)
	b.await("both zones", `document.querySelectorAll('#zones article').length === 2`)
	b.await("the most refused client, as text", `document.querySelector('#top tr td.name').textContent === "{header.X-Key} 'greedy<b onload=x>&\"'\\'''" && +document.querySelector('#top tr td.number').textContent.replace(/\D/g, '') > 20 && / ago$/.test(document.querySelector('#top tr').textContent)`)
	b.await("when the zone refused last", `/last refusal .* ago/.test(document.querySelector('[data-zone=api]').textContent)`)
	b.await("the servers of both shards, with latencies", `document.querySelectorAll('#stores tr[data-server] .good').length === 4 && /[0-9] (ms|µs)/.test(document.querySelector('#stores tr[data-server]').textContent)`)
	for range 35 {
		if _, err := s.ask("/", "nearly"); err != nil {
			t.Fatal(err)
		}
	}
	b.await("a client near its limit", `/^apidefault.header.X-Key. nearly35 of 40in /m.test([...document.querySelectorAll('#near tr')].map(r => r.textContent).join('\n').replaceAll('{', '.').replaceAll('}', '.'))`)
	b.await("how many have nothing left", `/In zone api \d+ clients? ha.* nothing left/.test(document.getElementById('near-note').textContent)`)
	if b.is(`!document.getElementById('health').hidden`) {
		t.Errorf("while all is well the page says %s", run[string](b, `document.getElementById('health').innerText`))
	}
	b.satisfied("under load")
	stop()

	b.isNotDriven(s)
	b.findAndReset(s)
	b.satisfied("search and reset")
	b.fitsPhone()
	b.isAccessible(s)
	b.satisfied("phone and keyboard")

	b.noticesWrongs(s)
	must(t, s.replica.Stop())
	stop = s.load(t, greedy)
	b.await("a problem of the replica", `/the replica `+s.replica.Addr()+` of shard a is left out of checks/.test(document.getElementById('health').innerText)`)
	stop()
	b.isLegible("with a problem")
	s.caddy.Stop()
	b.await("an error when Caddy is away", `!document.getElementById('error').hidden && /admin/.test(document.getElementById('error').textContent)`)
}

// noticesWrongs requires that the policy stops forbidden actions, and that satisfied
// would report them.
func (b *browser) noticesWrongs(s *site) {
	b.t.Helper()
	b.do(chromedp.Evaluate[chromedp.Void](`console.error("wrong"); fetch("http://` + s.addr + `/").then(() => { window.left = true }, () => { window.stayed = true })`))
	b.await("the end of a request to another site", `window.stayed || window.left`)
	if b.is(`window.left`) {
		b.t.Error("the page can call another site")
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if all := strings.Join(b.complaints, "\n"); !strings.Contains(all, "console.error") || !strings.Contains(all, "Content Security Policy") {
		b.t.Errorf("noticed is only %s", all)
	}
	b.complaints = nil
}

// scripted is an admin API whose answers a test writes, by method and target below
// /rate_limit/. Answers may wait, so that they arrive in another order than they were
// asked for.
type scripted struct {
	mu      sync.Mutex
	answers map[string]func() (status int, answer any)
	asked   map[string]int
}

// startScripted serves the page with an API that has one zone and nothing else.
func startScripted(t *testing.T) (api *scripted, page string) {
	t.Helper()
	api = &scripted{answers: map[string]func() (int, any){}, asked: map[string]int{}}
	api.answer("GET ", adminapi.Status{Problems: []adminapi.Problem{}, Zones: []adminapi.Zone{scriptedZone("default", nil)}, Stores: []adminapi.Store{}})
	api.answer("GET top?n=10", adminapi.Tops{Zones: []adminapi.Top{}})
	api.answer("GET near?n=10", adminapi.Nears{Zones: []adminapi.Near{}})
	api.answer("GET overrides", adminapi.Overrides{Overrides: []adminapi.Override{}})
	l, err := ui.Listen(t.Context(), "127.0.0.1:0")
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- ui.Serve(ctx, l, ui.Handler(api, l.Addr().(*net.TCPAddr))) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
	})
	return api, "http://" + l.Addr().String() + "/"
}

func (s *scripted) answer(target string, answer any) {
	s.answerWith(target, func() (int, any) { return http.StatusOK, answer })
}

// errorAnswer answers with an error.
func errorAnswer(text string) func() (int, any) {
	return func() (int, any) { return http.StatusBadGateway, map[string]string{"error": text} }
}

// answerLater answers once the returned function has been called.
func (s *scripted) answerLater(target string, answer any) (release func()) {
	released := make(chan struct{})
	s.answerWith(target, func() (int, any) {
		<-released
		return http.StatusOK, answer
	})
	return sync.OnceFunc(func() { close(released) })
}

func (s *scripted) answerWith(target string, answer func() (int, any)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.answers[target] = answer
}

// count returns how often a target was asked for.
func (s *scripted) count(target string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked[target]
}

// Call implements [ui.API].
func (s *scripted) Call(_ context.Context, method, path string, _ []byte) (int, []byte, error) {
	target := method + " " + strings.TrimPrefix(path, "/rate_limit/")
	s.mu.Lock()
	s.asked[target]++
	answer := s.answers[target]
	s.mu.Unlock()
	if answer == nil {
		return 0, nil, fmt.Errorf("the test has no answer to %s", target)
	}
	status, value := answer()
	text, err := json.Marshal(value)
	return status, text, err
}

// scriptedZone is zone api in a store.
func scriptedZone(storeName string, decisions map[string]int64) adminapi.Zone {
	all := map[string]int64{}
	for o := telemetry.Allowed; o < telemetry.Outcomes; o++ {
		all[o.String()] = decisions[o.String()]
	}
	return adminapi.Zone{Name: "api", Store: storeName, Algorithm: store.SlidingWindow, Events: "10", Window: 60, Enforce: 100, Decisions: all}
}

// scriptedClient is a client of zone api by its value.
func scriptedClient(value string) adminapi.Client {
	return adminapi.Client{ClientKey: "key:" + value, Template: "{header.X-Key}", Values: []string{value}}
}

// scriptedBuckets is the bucket of a client in zone api.
func scriptedBuckets(value string) adminapi.Buckets {
	return adminapi.Buckets{Zone: "api", Store: "default", Buckets: []adminapi.Bucket{{
		BucketName: adminapi.BucketName{Client: scriptedClient(value)},
		Copies:     adminapi.Copies{Servers: []adminapi.Copy{{State: &adminapi.State{Limit: 10, Used: 3, Remaining: 7}}}},
	}}}
}

// bucketTarget is what the page asks for a client's bucket, with the method in front.
func bucketTarget(value string) string {
	return "buckets/api?" + url.Values{"client_key": {"key:" + value}, "store": {"default"}}.Encode()
}

// received waits until the page has the answers to so many calls of a target.
func (b *browser) received(target string, times int) {
	b.t.Helper()
	b.await("the answer to "+target, fmt.Sprintf(`performance.getEntriesByType('resource').filter(e => e.responseEnd && e.name.endsWith(%q)).length >= %d`, "/rate_limit/"+target, times))
	// The page reads what has arrived.
	b.do(chromedp.Sleep(200 * time.Millisecond))
}

// TestLateAnswers never replace those to newer questions.
func TestLateAnswers(t *testing.T) {
	api, page := startScripted(t)
	names := []string{"first", "second"}
	for _, name := range names {
		api.answer("GET clients?name="+name, adminapi.Found{Zones: []adminapi.Buckets{scriptedBuckets(name)}})
	}
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	search := func(name string) {
		b.do(chromedp.SetValue("#name", name), chromedp.SendKeys("#name", "\r"))
	}
	has := func(id, name string) string {
		return fmt.Sprintf(`document.getElementById(%q).textContent.includes(%q)`, id, name)
	}

	release := api.answerLater("GET clients?name=first", adminapi.Found{Zones: []adminapi.Buckets{scriptedBuckets("first")}})
	defer release()
	search("first")
	search("second")
	b.await("the newer search", has("results", "second"))
	release()
	b.received("clients?name=first", 1)
	if !b.is(has("results", "second")) {
		t.Error("an older search replaced a newer one")
	}

	both := adminapi.Found{Zones: []adminapi.Buckets{scriptedBuckets("first"), scriptedBuckets("second")}}
	api.answer("GET clients?name=both", both)
	search("both")
	b.await("both clients", `document.querySelectorAll('#results tbody tr').length === 2`)
	release = api.answerLater("GET "+bucketTarget("first"), scriptedBuckets("first"))
	defer release()
	api.answer("GET "+bucketTarget("second"), scriptedBuckets("second"))
	b.do(chromedp.Click("#results tr:nth-child(1) button"), chromedp.Click("#results tr:nth-child(2) button"))
	b.await("the bucket of the last row", has("found", "second"))
	release()
	b.received(bucketTarget("first"), 1)
	if !b.is(has("found", "second")) {
		t.Error("the bucket of an older row replaced that of the last one")
	}

	release = api.answerLater("GET "+bucketTarget("first"), scriptedBuckets("first"))
	defer release()
	b.do(chromedp.Click("#results tr:nth-child(1) button"))
	search("second")
	b.await("no bucket after a new search", `!document.getElementById('found').hasChildNodes()`)
	release()
	b.received(bucketTarget("first"), 2)
	if !b.is(`!document.getElementById('found').hasChildNodes()`) {
		t.Error("a bucket from before the search came after it")
	}

	// A list from before a block ended would offer to end it again.
	blocked := adminapi.Overrides{Overrides: []adminapi.Override{{Kind: store.OverrideBlock, Zone: "api", Store: "default", Client: scriptedClient("second"), Until: 4e9}}}
	api.answer("GET overrides", blocked)
	b.await("a block", `document.querySelector('#overrides button')`)
	release = api.answerLater("GET overrides", blocked)
	defer release()
	before := api.count("GET overrides")
	b.awaitCalls(api, "GET overrides", before+1)
	api.answer("GET overrides", adminapi.Overrides{Overrides: []adminapi.Override{}})
	api.answer("DELETE blocks/api?"+url.Values{"client_key": {"key:second"}, "store": {"default"}}.Encode(), blocked)
	b.do(chromedp.Click("#overrides td:last-child button"))
	b.await("the end of the block", `!document.querySelector('#overrides tr')`)
	release()
	b.received("overrides", before+2)
	if !b.is(`!document.querySelector('#overrides tr')`) {
		t.Error("an older list of overrides replaced a newer one")
	}
	b.satisfied("late answers")
}

// awaitCalls waits until the page has asked for a target so many times.
func (b *browser) awaitCalls(api *scripted, target string, times int) {
	b.t.Helper()
	for deadline := time.Now().Add(waitTimeout); api.count(target) < times; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.t.Fatalf("the page does not ask for %s again", target)
		}
	}
}

// TestBlockedAreRefused in the charts: a blocked client's requests got a refusal.
func TestBlockedAreRefused(t *testing.T) {
	api, page := startScripted(t)
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("the zone", `document.querySelector('[data-zone=api] span.refused').textContent === '0.0/s refused'`)
	var blocked int64
	api.answerWith("GET ", func() (int, any) {
		blocked += 100
		zone := scriptedZone("default", map[string]int64{telemetry.Blocked.String(): blocked})
		return http.StatusOK, adminapi.Status{Problems: []adminapi.Problem{}, Zones: []adminapi.Zone{zone}, Stores: []adminapi.Store{}}
	})
	b.await("blocked requests among those refused", `document.querySelector('[data-zone=api] span.allowed').textContent === '0.0/s allowed' && parseFloat(document.querySelector('[data-zone=api] span.refused').textContent) > 1`)
	b.satisfied("blocked requests")
}

// TestAnnouncements are made once, however often the numbers in them change.
func TestAnnouncements(t *testing.T) {
	api, page := startScripted(t)
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page), chromedp.Evaluate[chromedp.Void](`
		window.written = [];
		for (const region of document.querySelectorAll('[aria-live], [role=status], [role=alert]'))
			new MutationObserver(() => written.push(region.id + ": " + region.textContent)).observe(region, {childList: true, characterData: true, subtree: true});`))
	b.await("the page", `document.getElementById('state').textContent === 'Live'`)
	status := adminapi.Status{Zones: []adminapi.Zone{scriptedZone("default", nil)}, Stores: []adminapi.Store{}}
	lag := 0
	api.answerWith("GET ", func() (int, any) {
		lag++
		status.Problems = []adminapi.Problem{{Store: "default", Shard: "a", Server: "r", Text: fmt.Sprintf("the replica r of shard a is %d.5 seconds behind, so it is not asked", lag)}}
		return http.StatusOK, status
	})
	b.await("the lag, which grows", `/ ([3-9]|[0-9]{2,}).5 seconds behind/.test(document.getElementById('problems').textContent)`)
	api.answerWith("GET ", errorAnswer("Caddy is away."))
	b.await("the error", `!document.getElementById('error').hidden`)
	b.awaitCalls(api, "GET ", api.count("GET ")+3)
	api.answer("GET ", adminapi.Status{Problems: []adminapi.Problem{}, Zones: []adminapi.Zone{}, Stores: []adminapi.Store{}})
	b.await("the end of the error", `document.getElementById('error').hidden`)
	var announced []string
	for _, text := range run[[]string](b, `written`) {
		if !strings.HasSuffix(text, ": ") && !strings.HasPrefix(text, "state: Live") {
			announced = append(announced, text)
		}
	}
	slices.Sort(announced) // by region: the observers are not called in the order of the changes
	want := []string{"announced: Store default: the replica r of shard a is some time behind, so it is not asked.", "error: Caddy is away.", "state: Not up to date"}
	if !slices.Equal(announced, want) {
		t.Errorf("announced is %q, want %q", announced, want)
	}
}

// TestHealthWaitsForNothing: the page shows each answer when it comes, and goes on asking.
func TestHealthWaitsForNothing(t *testing.T) {
	api, page := startScripted(t)
	slow := []string{"GET top?n=10", "GET near?n=10", "GET overrides"}
	for _, target := range slow {
		release := api.answerLater(target, map[string]any{"zones": []any{}, "overrides": []any{}})
		defer release()
	}
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("the zones", `document.querySelector('[data-zone=api]')`)
	api.answer("GET ", adminapi.Status{Problems: []adminapi.Problem{{Store: "default", Shard: "a", Text: "the servers of shard a are not found"}}})
	b.await("a problem that comes up meanwhile", `/not found/.test(document.getElementById('health').innerText)`)
	for _, target := range slow {
		if n := api.count(target); n != 1 {
			t.Errorf("%s was asked %d times before it was answered", target, n)
		}
	}
	b.satisfied("slow answers")
}

// TestHostileClients are shown with nothing hidden, and nothing that their key says can
// be taken for a note.
func TestHostileClients(t *testing.T) {
	api, page := startScripted(t)
	shown := map[string]string{
		"plain-1":                     "plain-1",
		"evil\u202eexe.txt":           `'evil\u202eexe.txt'`,
		"zero\u200bwidth\\":           `'zero\u200bwidth\\'`,
		"line\nbreak\U000e0041\u00a0": `'line\x0abreak\U000e0041\u00a0'`,
		"x (a digest, by key_secret)": `'x (a digest, by key_secret)'`,
		"it's":                        `'it'\''s'`,
		"{1..3}":                      `'{1..3}'`,
		"{uuid}":                      "{uuid}",
		"":                            "''",
		"a{b}c..d":                    "'a{b}c..d'",
	}
	top := adminapi.Top{Zone: "api"}
	for value := range shown {
		top.Refused = append(top.Refused, adminapi.RefusedClient{Client: scriptedClient(value), Store: "default", Count: 1})
	}
	two, option, binary := scriptedClient("a b"), scriptedClient("--address=x"), adminapi.Client{ClientKey: "base64:_w", Note: "in base64"}
	two.Values = append(two.Values, "c")
	near := adminapi.Near{Zone: "api"}
	for _, client := range []adminapi.Client{two, option, binary} {
		near.Clients = append(near.Clients, adminapi.NearClient{Client: client, Store: "default", Limit: 10, Used: 9})
	}
	api.answer("GET near?n=10", adminapi.Nears{Zones: []adminapi.Near{near}})
	api.answer("GET top?n=10", adminapi.Tops{Zones: []adminapi.Top{top}})
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("the clients", `document.querySelectorAll('#top tr, #near tr').length === 13`)
	var others []string
	for _, text := range shown {
		others = append(others, "{header.X-Key} "+text)
	}
	for what, test := range map[string]struct {
		expression string
		want       []string
	}{
		"texts": {
			`[...document.querySelectorAll('#top td.name, #near td.name')].map(e => e.textContent)`,
			[]string{"{header.X-Key} 'a b' c", "-- {header.X-Key} '--address=x'", "base64:_w (in base64)"},
		},
		"names": {
			`[...document.querySelectorAll('#top button, #near button')].map(e => e.getAttribute('aria-label').replace(/^Look up (.*) in zone api$/, '$1'))`,
			[]string{"{header.X-Key} 'a b' c", "-- {header.X-Key} '--address=x'", "base64:_w"},
		},
		"values": {
			`[...document.querySelectorAll('#top td.name, #near td.name')].map(e => '{header.X-Key} ' + [...e.querySelectorAll('bdi')].map(v => v.textContent).join(' '))`,
			[]string{"{header.X-Key} 'a b' c", "{header.X-Key} '--address=x'", "{header.X-Key} base64:_w"},
		},
	} {
		got, want := run[[]string](b, test.expression), append(test.want, others...)
		slices.Sort(got)
		if slices.Sort(want); !slices.Equal(got, want) {
			t.Errorf("the %s are %q, want %q", what, got, want)
		}
	}
	bucket := scriptedBuckets("")
	bucket.Buckets[0].Client = binary
	api.answer("GET buckets/api?"+url.Values{"client_key": {binary.ClientKey}, "store": {"default"}}.Encode(), bucket)
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector('#near [data-client$="base64:_w"]').click()`))
	b.await("the bucket of a key that is no text", `document.querySelector('#found [data-bucket="base64:_w"] button')`)
	b.satisfied("hostile clients")
}

// TestStoreColumn is there where a zone counts in several stores.
func TestStoreColumn(t *testing.T) {
	api, page := startScripted(t)
	past := float64(time.Now().Unix() - 5)
	api.answer("GET overrides", adminapi.Overrides{Overrides: []adminapi.Override{{Kind: store.OverrideBlock, Zone: "api", Store: "new", Client: scriptedClient("x"), Until: past}}})
	api.answer("GET near?n=10", adminapi.Nears{Zones: []adminapi.Near{{Zone: "api", Clients: []adminapi.NearClient{{Client: scriptedClient("x"), Store: "new", Limit: 10, Used: 9, Reset: past}}}}})
	api.answer("GET top?n=10", adminapi.Tops{Zones: []adminapi.Top{{Zone: "api", Refused: []adminapi.RefusedClient{{Client: scriptedClient("x"), Store: "new", Count: 1}}}}})
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	columns := func(n int) string {
		return fmt.Sprintf(`['overrides', 'near', 'top'].every(list => [...document.querySelectorAll('#' + list + ' tr')].filter(r => r.innerText.includes('new')).length === %d) &&
			[...document.querySelectorAll('th.store')].filter(e => e.checkVisibility()).length === %d`, n, 3*n)
	}
	b.await("lists without stores", `['overrides', 'near', 'top'].every(list => document.querySelectorAll('#' + list + ' tr').length === 1) && document.querySelector('[data-zone=api]') && `+columns(0))
	// An end that has passed.
	for _, list := range []string{"overrides", "near"} {
		if text := run[string](b, `[...document.querySelectorAll('#`+list+` td.number')].at(-1).textContent`); text != "now" {
			t.Errorf("%s: what has ended ends %q", list, text)
		}
	}
	moved := scriptedZone("default", nil)
	moved.Rollout = &adminapi.Rollout{Store: "new", Percent: 10}
	for what, zones := range map[string][]adminapi.Zone{
		"a rollout":    {moved},
		"two handlers": {scriptedZone("default", nil), scriptedZone("new", nil)},
	} {
		api.answer("GET ", adminapi.Status{Problems: []adminapi.Problem{}, Zones: zones, Stores: []adminapi.Store{}})
		b.await("stores with "+what, columns(1))
		api.answer("GET ", adminapi.Status{Problems: []adminapi.Problem{}, Zones: []adminapi.Zone{}, Stores: []adminapi.Store{}})
		b.await("no stores again", columns(0))
	}
	b.satisfied("stores")
}

// TestNearUnknown names the stores that cannot list clients.
func TestNearUnknown(t *testing.T) {
	api, page := startScripted(t)
	api.answer("GET near?n=10", map[string]any{"zones": []any{map[string]any{"zone": "api", "clients": []any{}, "unlisted_stores": []string{"plugged"}}}})
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("a note", `document.getElementById('near-note').textContent`)
	if text := run[string](b, `document.getElementById('near-note').textContent`); strings.TrimSpace(text) != "Store plugged cannot tell who is near a limit." {
		t.Errorf("the note is %q", text)
	}
}

// TestChanges: what an operator typed is lost only if the operator closes it, and each
// change is reported, whatever becomes of the calls after it.
func TestChanges(t *testing.T) {
	api, page := startScripted(t)
	api.answer("GET clients?name=x", adminapi.Found{Zones: []adminapi.Buckets{scriptedBuckets("x")}})
	api.answer("GET "+bucketTarget("x"), scriptedBuckets("x"))
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page), chromedp.SetValue("#name", "x"), chromedp.SendKeys("#name", "\r"))
	b.await("the client", `document.querySelector('#results button')`)
	b.do(chromedp.Click("#results button"))
	b.await("the bucket", `document.querySelector('#found button')`)

	const reason = "#found label:last-of-type input"
	for _, field := range []string{reason, "#found select", "#found input[type=number]"} {
		b.do(chromedp.Focus(field))
		if field == reason {
			b.do(chromedp.KeyEvent("a/b"))
		}
		b.do(chromedp.KeyEvent(kb.Escape))
		b.await("Escape leaves "+field, `document.activeElement.id === 'found'`)
		if !b.is(`document.querySelector('` + reason + `').value === 'a/b'`) {
			t.Fatalf("Escape in %s loses the reason", field)
		}
	}
	b.do(chromedp.KeyEvent("/", chromedp.KeyModifiers(chromedp.ModifierCtrl)))
	if b.is(`document.activeElement.id === 'name'`) {
		t.Error("a shortcut of the browser leads to the search")
	}

	// The calls that follow a change fail.
	gone := errorAnswer("the shard is away")
	api.answer("DELETE "+bucketTarget("x"), adminapi.Resets{Zone: "api", Store: "default", Buckets: []adminapi.Reset{{BucketName: adminapi.BucketName{Client: scriptedClient("x")}, Deleted: true}}})
	for _, target := range []string{"GET overrides", "GET clients?name=x"} {
		api.answerWith(target, gone)
	}
	override := adminapi.Override{Kind: store.OverrideBlock, Zone: "api", Store: "default", Client: scriptedClient("x")}
	api.answer("POST blocks/api?client_key=key%3Ax&for=1h&reason=a%2Fb&store=default", adminapi.Overrides{Overrides: []adminapi.Override{override}})
	api.answerWith("POST grants/api?client_key=key%3Ax&events=100&reason=a%2Fb&store=default", errorAnswer("no room"))
	report := func(button, want string) {
		t.Helper()
		b.do(chromedp.Click(`#found [aria-label^="` + button + `"]`))
		b.await("the report of "+button, `document.getElementById('done').textContent`)
		if got := run[string](b, `document.getElementById('done').textContent`); got != want {
			t.Errorf("%s is reported as %q, want %q", button, got, want)
		}
	}
	report("Block", "Begun: block for {header.X-Key} x in zone api.")
	report("Grant", "no room")
	api.answerWith("GET "+bucketTarget("x"), gone)
	report("Reset", "Reset: {header.X-Key} x in zone api.")
	b.await("the error of the call after it", `document.getElementById('found').textContent === 'the shard is away'`)
	if !b.is(`document.getElementById('done').textContent.startsWith('Reset: ')`) {
		t.Error("the report of the reset is gone")
	}
}

// TestPicture takes the pictures of the page for the documentation, in both color schemes,
// and in the dark one with a problem.
func TestPicture(t *testing.T) {
	const client = "mobile-app"
	s := startSite(t, "10s")
	defer s.load(t, client)()
	s.block(t, "api", "price-scraper")
	points := 3
	if *pictures != "" {
		points = 45 // a minute and a half
	}
	b := startBrowser(t, s.page)
	b.do(chromedp.EmulateViewport(1200, 1000), chromedp.Navigate(s.page))
	ended := make(chan struct{})
	defer func() { <-ended }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer close(ended)
		s.nearTheLimit(ctx, t, "partner-7")
	}()
	b.await("charts", fmt.Sprintf(`document.querySelector('[data-zone=api] polyline.refused').getAttribute('points').split(' ').length > %d`, points))
	b.do(chromedp.SendKeys("#name", client+"\r"))
	b.await("a client near its limit, and what was searched for", `document.querySelector('#near tr') && document.querySelector('#results tbody tr')`)
	for _, picture := range []struct{ scheme, file string }{{"light", "ui.png"}, {"dark", "ui-dark.png"}} {
		scheme, file := picture.scheme, picture.file
		if scheme == "dark" {
			must(t, s.replica.Stop())
			b.await("a problem", `/is left out/.test(document.getElementById('problems').textContent)`)
		}
		b.do(inColors(scheme), chromedp.Evaluate[chromedp.Void](`document.activeElement.blur(); scrollTo(0, 0)`))
		picture, err := chromedp.Run(b.ctx, chromedp.FullScreenshot(100))
		must(t, err)
		decoded, err := png.Decode(bytes.NewReader(picture))
		must(t, err)
		if gray := color.GrayModel.Convert(decoded.At(2, 2)).(color.Gray); (gray.Y < 64) != (scheme == "dark") {
			t.Errorf("the picture of the %s page has a background of brightness %d", scheme, gray.Y)
		}
		if *pictures != "" {
			must(t, os.WriteFile(filepath.Join(*pictures, file), picture, 0o644))
		}
	}
}

// block blocks a client, as the page does.
func (s *site) block(t *testing.T, zone, client string) {
	t.Helper()
	query := url.Values{"key": {client}, "for": {"1h"}, "reason": {"scraper"}}
	r, err := http.NewRequest(http.MethodPost, s.page+"rate_limit/blocks/"+zone+"?"+query.Encode(), nil)
	must(t, err)
	r.Header.Set("X-Rate-Limit-Page", "1")
	resp, err := http.DefaultClient.Do(r)
	must(t, err)
	must(t, resp.Body.Close())
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("the block was answered with %s", resp.Status)
	}
}

// nearTheLimit sends requests of a client that keeps near its limit, until ctx ends.
func (s *site) nearTheLimit(ctx context.Context, t *testing.T, client string) {
	for ctx.Err() == nil {
		for range 35 {
			if _, err := s.ask("/", client); err != nil {
				t.Errorf("near the limit: %v", err)
				return
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(11 * time.Second):
		}
	}
}

// slash presses the key as a keyboard does: KeyEvent types the letter even if the page
// prevents that.
var slash = chromedp.Func(func(ctx context.Context, tab *chromedp.Target) error {
	_, err := cdp.Call(ctx, tab, input.DispatchKeyEvent, input.DispatchKeyEventParams{
		Type: input.DispatchKeyEventTypeKeyDown, Key: "/", Code: "Slash", Text: "/", WindowsVirtualKeyCode: 191,
	})
	return err
})

// findAndReset works with the keyboard alone, but for one click.
func (b *browser) findAndReset(s *site) {
	b.t.Helper()
	if status, err := s.ask("/", greedy); err != nil || status != http.StatusTooManyRequests {
		b.t.Fatalf("the greedy client got %d, %v", status, err)
	}
	b.do(chromedp.Evaluate[chromedp.Void](`document.activeElement.blur()`), slash)
	b.await("the slash leads to the search, and is not typed", `document.activeElement.id === 'name' && document.activeElement.value === ''`)
	b.do(chromedp.KeyEvent("a/b"))
	b.await("in the search it is a letter", `document.activeElement.value === 'a/b'`)
	b.do(chromedp.KeyEvent(kb.Escape))
	b.await("Escape leaves the search", `document.activeElement === document.body`)
	b.do(chromedp.Evaluate[chromedp.Void](`document.getElementById('name').value = ''`), slash, chromedp.KeyEvent(greedy+"\r"))
	b.await("the greedy client in both zones", `document.querySelectorAll('#results tbody tr').length === 2 && /^apidefault.header.X-Key. 'greedy.*40 of 40in .* ago$/.test(document.querySelector('#results tbody tr').textContent)`)
	b.do(chromedp.KeyEvent("\t"), chromedp.KeyEvent("\t"))
	b.await("Tab leads to the first row", `document.activeElement === document.querySelector('#results tbody button')`)
	b.do(chromedp.KeyEvent("\r"))
	b.await("the greedy client's bucket, on a primary and a replica", `/40 of 40/.test(document.getElementById('found').textContent) && document.querySelectorAll('#found tbody tr').length === 2`)
	b.do(chromedp.KeyEvent("\t"), chromedp.KeyEvent("\r"))
	b.await("the reset", `/^Reset: .*greedy.* in zone api.$/.test(document.getElementById('done').textContent) && document.activeElement.id === 'found'`)
	if status, err := s.ask("/", greedy); err != nil || status != http.StatusOK {
		b.t.Errorf("after the reset the greedy client got %d, %v", status, err)
	}
	b.blocksAndGrants(s)
	b.do(focus("#found button"), chromedp.KeyEvent(kb.Escape))
	b.await("Escape leads back to the row", `!document.getElementById('found').hasChildNodes() && document.activeElement === document.querySelector('#results tbody button')`)
	// The list leads to the bucket too.
	b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#top tr td.number").click()`))
	b.await("the bucket of the list's client", `/ of 40/.test(document.getElementById('found').textContent)`)
	b.do(chromedp.SetValue("#name", "{header.X-Key} nobody"), chromedp.SendKeys("#name", "\r"))
	b.await("a client that is not there", `document.querySelectorAll('#results tbody tr').length === 2 && /^apidefault.header.X-Key. nobodynothing––$/.test(document.querySelector('#results tbody tr').textContent)`)
	b.do(chromedp.SetValue("#name", "{client_ip} 127.0.0.1"), chromedp.SendKeys("#name", "\r"))
	b.await("a client of another text", `/client_ip. 127.0.0.1/.test(document.querySelector('#results tbody').textContent)`)
	b.do(chromedp.SetValue("#name", "{client_ip} nobody"), chromedp.SendKeys("#name", "\r"))
	b.await("no such client", `/No zone has a key/.test(document.getElementById('results').textContent)`)
}

// blocksAndGrants changes what the greedy client may, whose bucket is shown and has one
// request in it, and ends the changes.
func (b *browser) blocksAndGrants(s *site) {
	b.t.Helper()
	asks := func(when string, want int) {
		b.t.Helper()
		if status, err := s.ask("/", greedy); err != nil || status != want {
			b.t.Errorf("%s the greedy client got %d, %v", when, status, err)
		}
	}
	ends := func(kind string) {
		b.t.Helper()
		b.await("the list of what was changed", `document.querySelectorAll('#overrides tr').length === 1 && /greedy.*`+kind+`.*in .*<i>why/.test(document.querySelector('#overrides tr').textContent)`)
		b.do(focus("#overrides td:last-child button"), chromedp.KeyEvent("\r"))
		b.await("the end", `document.querySelectorAll('#overrides tr').length === 0 && /Nobody/.test(document.getElementById('overrides-note').textContent)`)
	}
	b.do(chromedp.SendKeys("#found label:last-of-type input", "<i>why"), focus("#found [aria-label^=Block]"), chromedp.KeyEvent("\r"))
	b.await("the report of the block", `/^Begun: block for .*greedy.* in zone api.$/.test(document.getElementById('done').textContent)`)
	b.await("the block", `/block/.test(document.getElementById('overrides').textContent)`)
	b.await("the block among what was found", `/blocked, ends in /.test(document.querySelector('#results tbody tr').textContent)`)
	asks("blocked", http.StatusTooManyRequests)
	ends("block")
	asks("no longer blocked", http.StatusOK)
	b.do(focus("#found [aria-label^=Grant]"), chromedp.KeyEvent("\r"))
	ends("grant of 100")
}

// fitsPhone requires that the page fits a phone, in both color schemes.
func (b *browser) fitsPhone() {
	b.t.Helper()
	for _, scheme := range []string{"light", "dark"} {
		b.do(chromedp.EmulateViewport(360, 740, chromedp.EmulateMobile), inColors(scheme))
		if !b.is(`document.documentElement.scrollWidth <= innerWidth`) {
			b.t.Errorf("%s: the page is wider than a phone", scheme)
		}
		dark := `getComputedStyle(document.body).backgroundColor.match(/\d+/g).every(n => n < 64)`
		if b.is(dark) != (scheme == "dark") {
			b.t.Errorf("%s: the background is not", scheme)
		}
		b.isLegible(scheme)
	}
}

// isLegible requires the contrast of WCAG 2, level AA, of each text that is shown.
func (b *browser) isLegible(when string) {
	b.t.Helper()
	if faint := run[string](b, contrast); faint != "" {
		b.t.Errorf("%s: %s", when, faint)
	}
}

// contrast names the texts whose contrast to their background is below 4.5.
const contrast = `(() => {
	const parts = color => color.match(/[\d.]+/g).map(Number);
	const luminance = color => parts(color).slice(0, 3).map(c => c / 255).map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
		.reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
	const ground = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor; if (parts(c)[3] !== 0) return c } return "rgb(255, 255, 255)" };
	const faint = [];
	let seen = 0;
	for (const e of document.querySelectorAll("body *")) {
		if (!e.checkVisibility() || ["SCRIPT", "OPTION"].includes(e.tagName) || ![...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()) && e.tagName !== "INPUT") continue;
		seen++;
		const [a, b] = [luminance(getComputedStyle(e).color), luminance(ground(e))], ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
		if (ratio < 4.5) faint.push(e.tagName + " " + e.textContent + ": " + ratio.toFixed(2));
	}
	return seen > 20 ? faint.join("; ") : "only " + seen + " texts";
})()`

// inColors makes the browser prefer a color scheme.
func inColors(scheme string) chromedp.Action[chromedp.Void] {
	return chromedp.Func(func(ctx context.Context, tab *chromedp.Target) error {
		_, err := cdp.Call(ctx, tab, emulation.SetEmulatedMedia, emulation.SetEmulatedMediaParams{
			Features: []*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}},
		})
		return err
	})
}

// focus sets the focus on an element of a list that the page may draw anew at any time.
// chromedp finds an element in one call and uses it in the next, when it may be gone.
func focus(selector string) chromedp.Action[chromedp.Void] {
	return chromedp.Evaluate[chromedp.Void](fmt.Sprintf(`document.querySelector(%q).focus()`, selector))
}

// isAccessible requires that every control has a name and can be reached by keyboard.
func (b *browser) isAccessible(s *site) {
	b.t.Helper()
	if !b.is(`[...document.querySelectorAll('input, select, button, svg')].every(e => (e.getAttribute('aria-label') || e.textContent || (e.labels && e.labels[0] && e.labels[0].textContent) || '').trim() && (e.tagName !== 'INPUT' && e.tagName !== 'SELECT' || e.labels.length))`) {
		b.t.Error("something has no name")
	}
	b.do(chromedp.Evaluate[chromedp.Void](`document.activeElement.blur()`))
	// The lists have rows, and a bucket is shown.
	s.block(b.t, "api", "somebody")
	b.await("a blocked client", `document.querySelector('#overrides button')`)
	b.do(chromedp.Evaluate[chromedp.Void](`document.getElementById('results').replaceChildren()`), chromedp.SetValue("#name", greedy), chromedp.SendKeys("#name", "\r"))
	b.await("results", `document.querySelector('#results tbody button')`)
	b.do(focus("#results tbody button"), chromedp.KeyEvent("\r"))
	b.await("a bucket", `document.querySelector('#found button')`)
	b.do(chromedp.Evaluate[chromedp.Void](`document.activeElement.blur(); scrollTo(0, 0); getSelection().removeAllRanges()`), chromedp.Focus("#name"))
	reached := map[string]bool{"name": true}
	for range run[int](b, `document.querySelectorAll('input, select, button, [tabindex="0"]').length`) {
		b.do(chromedp.KeyEvent("\t"))
		at := run[string](b, `((e) => (e.closest("[id]") || e).id + " " + e.textContent.trim().slice(0, 5))(document.activeElement)`)
		reached[at] = true
		if !b.is(`document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== 'none' && parseFloat(getComputedStyle(document.activeElement).outlineWidth) >= 2`) {
			b.t.Errorf("the focus on %s is not visible", at)
		}
	}
	for _, name := range []string{"name", "find Find", "results {head", "found Reset", "found Block", "found Grant", "top {head", "near {head", "overrides {head", "overrides End", "stores defau"} {
		if !reached[name] {
			b.t.Errorf("the keyboard does not reach %s, only %v", name, reached)
		}
	}
}
