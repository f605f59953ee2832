//go:build check

package ui_test

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/ui"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/store"
)

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
	api = newScripted()
	return api, servePage(t, api)
}

func newScripted() *scripted {
	api := &scripted{answers: map[string]func() (int, any){}, asked: map[string]int{}}
	api.answer("GET ", adminapi.Status{Problems: []adminapi.Problem{}, Zones: []adminapi.Zone{scriptedZone("default", nil)}, Stores: []adminapi.Store{}})
	api.answer("GET top?n=100", adminapi.Tops{Zones: []adminapi.Top{}})
	api.answer("GET near?n=100", adminapi.Nears{Zones: []adminapi.Near{}})
	api.answer("GET overrides", adminapi.Overrides{Overrides: []adminapi.Override{}})
	api.answer("GET history?range=1h&zone=api", scriptedHistory("1h", nil))
	return api
}

// servePage serves the page, and returns its URL.
func servePage(t *testing.T, api ui.API) string {
	t.Helper()
	l, err := ui.Listen(t.Context(), "127.0.0.1:0")
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- ui.Serve(ctx, l, ui.Handler(api, l.Addr().(*net.TCPAddr))) }()
	t.Cleanup(func() {
		cancel()
		must(t, <-ended)
	})
	return "http://" + l.Addr().String() + "/"
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
	if answer == nil && strings.HasPrefix(target, "GET clients?prefix=") {
		answer = func() (int, any) { return http.StatusOK, adminapi.Matches{Clients: []adminapi.Match{}} }
	}
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
	return adminapi.Zone{Name: "api", Store: storeName, Algorithm: store.SlidingWindow.String(), Events: "10", Window: 60, Enforce: 100, Decisions: all}
}

// scriptedHistory is that of zone api, whose last two steps have these counts each by the name of the series.
func scriptedHistory(name string, last map[string]float64) adminapi.History {
	steps, step, partial := 360, int64(10), int64(0)
	if name != "1h" {
		steps, step, partial = map[string]int{"24h": 288, "1w": 2016}[name], 300, 150
	}
	series := func(kind string) adminapi.Series {
		s := make(adminapi.Series, steps)
		s[0], s[steps-2], s[steps-1] = math.NaN(), last[kind], last[kind]
		return s
	}
	return adminapi.History{Range: name, Step: step, Start: time.Now().Unix()/step*step - int64(steps)*step, Partial: partial, Zones: []adminapi.ZoneHistory{{
		Zone: "api", Allowed: series("allowed"), WouldRefuse: series("would_refuse"), Refused: series("refused"),
		Unchecked: series("unchecked"), Waited: series("waited"), StoreCalls: series("store_calls"), StoreLatency: series("store_latency"),
	}}}
}

// scriptedClient is a client of zone api by its value.
func scriptedClient(value string) adminapi.Client {
	return adminapi.Client{ClientKey: "key:" + value, Template: "{header.X-Key}", Values: []string{value}}
}

// scriptedBuckets is the bucket of a client in zone api.
func scriptedBuckets(value string) adminapi.Buckets {
	limit, used, remaining := int64(10), int64(3), int64(7)
	return adminapi.Buckets{Zone: "api", Store: "default", Buckets: []adminapi.Bucket{{
		BucketName: adminapi.BucketName{Client: scriptedClient(value)},
		Copies:     adminapi.Copies{Servers: []adminapi.Copy{{State: &adminapi.State{Limit: &limit, Used: &used, Remaining: &remaining}}}},
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
	t.Parallel()
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
	for deadline := time.Now().Add(waitTimeout); api.count(target) < times; time.Sleep(20 * time.Millisecond) { // polls
		if time.Now().After(deadline) {
			b.t.Fatalf("the page does not ask for %s again", target)
		}
	}
}

// TestDecisionsAreInTheirSeries checks that each decision raises one series of the charts: what passes
// over the limit, or unlimited, is not among what was allowed.
func TestDecisionsAreInTheirSeries(t *testing.T) {
	t.Parallel()
	for decision, kind := range map[telemetry.Outcome]string{
		telemetry.Allowed: "allowed", telemetry.WouldRefuse: "would", telemetry.ErrorAllowed: "unchecked",
		telemetry.Refused: "refused", telemetry.ErrorRefused: "refused", telemetry.Blocked: "refused",
	} {
		t.Run(decision.String(), func(t *testing.T) {
			api, page := startScripted(t)
			b := startBrowser(t, page)
			b.do(chromedp.Navigate(page))
			b.await("the zone", `document.querySelector('[data-zone=api] span.refused').textContent === '0.0/s refused'`)
			var decided int64
			api.answerWith("GET ", func() (int, any) {
				decided += 100
				zone := scriptedZone("default", map[string]int64{decision.String(): decided})
				return http.StatusOK, adminapi.Status{Problems: []adminapi.Problem{}, Zones: []adminapi.Zone{zone}, Stores: []adminapi.Store{}}
			})
			b.await("the decisions in one series alone", `(() => {
				const shown = [...document.querySelectorAll('[data-zone=api] .series')].filter(e => parseFloat(e.textContent) > 1);
				return shown.length === 1 && shown[0].classList.contains("`+kind+`") && !shown[0].hidden;
			})()`)
			b.satisfied(decision.String())
		})
	}
}

// TestAnnouncements are made once, however often the numbers in them change.
func TestAnnouncements(t *testing.T) {
	t.Parallel()
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
		status.Problems = []adminapi.Problem{
			{Store: "default", Shard: "a", Server: "r", Text: fmt.Sprintf("the replica r of shard a is %d.5 seconds behind, so it is not asked", lag)},
			{Store: "default", Shard: "a", Server: "p", Text: fmt.Sprintf("the primary p of shard a is left out of checks, because calls of it fail: read tcp 127.0.0.1:%d", lag)},
			{Store: "default", Shard: "b", Text: fmt.Sprintf("the servers of shard b are not found; %d.0/s pass unlimited: on_error allow (zone api)", lag)},
		}
		return http.StatusOK, status
	})
	b.await("the lag, which grows", `/ ([3-9]|[0-9]{2,}).5 seconds behind/.test(document.getElementById('problems').textContent)`)
	b.await("how many pass unlimited", `/not found; [0-9]+.0.s pass unlimited: on_error allow/.test(document.getElementById('problems').textContent)`)
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
	want := []string{"announced: Store default: the replica r of shard a is some time behind, so it is not asked. Store default: the primary p of shard a is left out of checks, because calls of it fail. Store default: the servers of shard b are not found; requests pass unlimited: on_error allow (zone api).", "error: Caddy is away.", "state: Caddy is gone"}
	if !slices.Equal(announced, want) {
		t.Errorf("announced is %q, want %q", announced, want)
	}
}

// TestHealthWaitsForNothing: the page shows each answer when it comes, and goes on asking.
func TestHealthWaitsForNothing(t *testing.T) {
	t.Parallel()
	api, page := startScripted(t)
	slow := []string{"GET top?n=100", "GET near?n=100", "GET overrides"}
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
	t.Parallel()
	api, page := startScripted(t)
	shown := map[string]string{
		"plain-1":                     "plain-1",
		"evil\u202eexe.txt":           `'evil\u202eexe.txt'`,
		"zero\u200bwidth\\":           `'zero\u200bwidth\\'`,
		"line\nbreak\U000e0041\u00a0": `'line\x0abreak\U000e0041\u00a0'`,
		"x (a digest, by key_secret)": `'x (a digest, by key_secret)'`,
		"it's":                        `'it'\''s'`,
		"x';y '\t":                    `'x'\'';y '\''\x09'`,
		"{1..3}":                      `'{1..3}'`,
		"{uuid}":                      "{uuid}",
		"":                            "''",
	}
	top := adminapi.Top{Zone: "api"}
	for value := range shown {
		top.Refused = append(top.Refused, adminapi.RefusedClient{Client: scriptedClient(value), Store: "default", Count: 1})
	}
	two, option, binary := scriptedClient("a b"), scriptedClient("--address=x"), adminapi.Client{ClientKey: "base64:_w", Note: "in base64"}
	unknown := adminapi.Client{ClientKey: "$digest", Note: "a digest", Unknown: true}
	two.Values = append(two.Values, "c")
	near := adminapi.Near{Zone: "api"}
	for _, client := range []adminapi.Client{two, option, binary, unknown} {
		near.Clients = append(near.Clients, adminapi.NearClient{Client: client, Store: "default", Limit: 10, Used: 9})
	}
	api.answer("GET near?n=100", adminapi.Nears{Zones: []adminapi.Near{near}})
	api.answer("GET top?n=100", adminapi.Tops{Zones: []adminapi.Top{top}})
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.await("the clients", `document.querySelectorAll('#top tr, #near tr').length === 14`)
	b.do(reveal)
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
			[]string{"{header.X-Key} 'a b' c", "-- {header.X-Key} '--address=x'", "base64:_w (in base64)", "'$digest' (a digest)"},
		},
		"names": {
			`[...document.querySelectorAll('#top button, #near button')].map(e => e.getAttribute('aria-label').replace(/^Look up (.*) in zone api$/, '$1'))`,
			[]string{"{header.X-Key} 'a b' c", "-- {header.X-Key} '--address=x'", "base64:_w"},
		},
		"values": {
			`[...document.querySelectorAll('#top td.name, #near td.name')].map(e => '{header.X-Key} ' + [...e.querySelectorAll('bdi')].map(v => v.textContent).join(' '))`,
			[]string{"{header.X-Key} 'a b' c", "{header.X-Key} '--address=x'", "{header.X-Key} base64:_w", "{header.X-Key} '$digest'"},
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
	t.Parallel()
	api, page := startScripted(t)
	past := float64(time.Now().Unix() - 5)
	api.answer("GET overrides", adminapi.Overrides{Overrides: []adminapi.Override{{Kind: store.OverrideBlock, Zone: "api", Store: "new", Client: scriptedClient("x"), Until: past}}})
	api.answer("GET near?n=100", adminapi.Nears{Zones: []adminapi.Near{{Zone: "api", Clients: []adminapi.NearClient{{Client: scriptedClient("x"), Store: "new", Limit: 10, Used: 9, Reset: past}}}}})
	api.answer("GET top?n=100", adminapi.Tops{Zones: []adminapi.Top{{Zone: "api", Refused: []adminapi.RefusedClient{{Client: scriptedClient("x"), Store: "new", Count: 1}}}}})
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
	t.Parallel()
	api, page := startScripted(t)
	api.answer("GET near?n=100", map[string]any{"zones": []any{map[string]any{"zone": "api", "clients": []any{}, "unlisted_stores": []string{"plugged"}}}})
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
	t.Parallel()
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
		// A mouse would miss a button that moves, because the page shows the client again.
		b.do(chromedp.Evaluate[chromedp.Void](`document.querySelector('#found [aria-label^="` + button + `"]').click()`))
		if button != "Grant" {
			b.await("the question", `document.getElementById('confirm').open && document.getElementById('confirm-yes').textContent === '`+button+`'`)
			b.do(chromedp.Evaluate[chromedp.Void](`document.getElementById('confirm-yes').click()`))
		}
		b.await("the report of "+button+": "+want, `document.getElementById('done').textContent === '`+want+`'`)
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
