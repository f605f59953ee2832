//go:build check

package ui_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
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

	"github.com/shardlimit/caddy-shardlimit/internal/caddyproc"
	"github.com/shardlimit/caddy-shardlimit/internal/process"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
)

// site is a Caddy under load, with its page.
type site struct {
	caddy *caddyproc.Process
	// addr is where the site listens, page the URL of the page.
	addr, page string
	// client is the site's own: a test server that closes breaks requests of the default one.
	client  *http.Client
	replica *redistest.Server
}

const siteConfig = `{
	admin unix/%s
	persist_config off
	default_bind 127.0.0.1
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
			# On a busy machine on_error must not admit a client that is full, and no charge
			# be a problem that the page shows.
			check_timeout 1m
			charge_timeout 1m
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

func TestMain(m *testing.M) {
	code := redistest.RunTests(m)
	closeBrowser()
	os.Exit(code)
}

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
	s := &site{addr: addr, client: &http.Client{Transport: new(http.Transport)}, replica: a.Replicas[0]}
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
	resp, err := s.client.Do(r)
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
			time.Sleep(4 * time.Millisecond) // the load has to last, not to be a flood
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

// theBrowser is one for all tests, because its start takes longer than most of them.
var theBrowser = sync.OnceValues(func() (context.Context, error) {
	path, err := process.Find("chromium")
	if err != nil {
		return nil, fmt.Errorf("the page is tested in a browser: %w", err)
	}
	options := append(chromedp.DefaultExecAllocatorOptions[:], chromedp.ExecPath(path), chromedp.NoSandbox,
		chromedp.Flag("disable-dev-shm-usage", true),
		chromedp.Flag("host-resolver-rules", "MAP *.example 127.0.0.1"), chromedp.WSURLReadTimeout(time.Minute))
	allocator, cancel := chromedp.NewExecAllocator(context.Background(), options...)
	ctx, _ := chromedp.NewContext(allocator)
	closeBrowser = func() {
		_ = chromedp.Cancel(ctx)
		cancel()
	}
	return ctx, chromedp.Do(ctx, chromedp.Evaluate[chromedp.Void]("1"))
})

// closeBrowser closes the browser, if a test has started it.
var closeBrowser = func() {}

// startBrowser opens a tab that shares nothing with those of other tests, and has the focus as they do.
func startBrowser(t *testing.T, page string) *browser {
	t.Helper()
	first, err := theBrowser()
	must(t, err)
	b := &browser{t: t, page: page}
	var cancel context.CancelFunc
	b.ctx, cancel = chromedp.NewContext(first, chromedp.WithNewBrowserContext(), chromedp.WithListener(b.hear))
	t.Cleanup(cancel)
	b.do(chromedp.Func(func(ctx context.Context, tab *chromedp.Target) error {
		_, err := cdp.Call(ctx, tab, emulation.SetFocusEmulationEnabled, emulation.SetFocusEmulationEnabledParams{Enabled: true})
		return err
	}))
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

// waitTimeout is more than anything on the page takes on a busy machine.
const waitTimeout = 3 * time.Minute

// await waits until an expression is true on the page.
func (b *browser) await(what, expression string) {
	b.t.Helper()
	for deadline := time.Now().Add(waitTimeout); !b.is(expression); time.Sleep(100 * time.Millisecond) { // polls
		if time.Now().After(deadline) {
			b.t.Fatalf("%s: it does not come; the page is\n%s", what, run[string](b, "document.body.innerText"))
		}
	}
}

// TestPageInBrowser shows a live Caddy under load, and steers it.
func TestPageInBrowser(t *testing.T) {
	t.Parallel()
	s := startSite(t, "1h")
	stop := s.load(t, greedy)
	b := startBrowser(t, s.page)
	b.do(chromedp.EmulateViewport(1200, 1250), chromedp.Navigate(s.page))
	b.await("both zones", `document.querySelectorAll('#zones details').length === 2`)
	b.await("what happens now", `/[0-9.]*[1-9][0-9.]*.s allowed/.test(document.querySelector('[data-zone=api] .allowed').textContent) && /[0-9.]*[1-9][0-9.]*.s refused/.test(document.querySelector('[data-zone=api] .refused').textContent)`)
	b.do(reveal)
	b.await("the most refused client, as text", `document.querySelector('#top tr td.name').textContent === "{header.X-Key} 'greedy<b onload=x>&\"'\\'''" && +document.querySelector('#top tr td.number').textContent.replace(/\D/g, '') > 20 && / ago$/.test(document.querySelector('#top tr').textContent)`)
	b.await("when the zone refused last", `/last refusal .* ago/.test(document.querySelector('[data-zone=api]').textContent)`)
	b.await("the servers of both shards, with latencies", `document.querySelectorAll('#stores tr[data-server] .good').length === 4 && /[0-9] (ms|µs)/.test(document.querySelector('#stores tr[data-server]').textContent)`)
	for range 35 {
		if _, err := s.ask("/", "nearly"); err != nil {
			t.Fatal(err)
		}
	}
	b.await("a client near its limit", `/^apidefault.header.X-Key. nearly35 of 40in /m.test([...document.querySelectorAll('#near tr')].map(r => r.textContent).join('\n').replaceAll('{', '.').replaceAll('}', '.'))`)
	b.await("how many are at their limit", `/api: \d+ clients? at (its|their) limit/.test(document.getElementById('near-note').textContent)`)
	if b.is(`!document.getElementById('health').hidden`) {
		t.Errorf("while all is well the page says %s", run[string](b, `document.getElementById('health').innerText`))
	}
	b.await("a chart of what has happened", `/^Requests of zone api in the last hour: [1-9].* allowed, at most .*[1-9].* a second; [1-9].* refused, at most .*; calls of the store took at most /.test(document.querySelector('[data-zone=api] .chart').getAttribute('aria-label'))`)
	b.satisfied("under load")
	stop()

	b.isNotDriven(s)
	b.findAndReset(s)
	b.satisfied("search and reset")
	b.fitsPhone()
	b.isAccessible(s)
	b.satisfied("phone and keyboard")

	b.noticesWrongs(s)
	must(t, s.replica.Kill())
	stop = s.load(t, greedy)
	b.await("a problem of the replica", `/the replica `+s.replica.Addr()+` of shard a is left out of checks/.test(document.getElementById('health').innerText)`)
	stop()
	b.isLegible("with a problem")
	s.caddy.Stop()
	b.await("an error when Caddy is away", `!document.getElementById('error').hidden && /admin/.test(document.getElementById('error').textContent) && document.getElementById('state').textContent === 'Caddy is gone'`)
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

// block blocks a client, as the page does.
func (s *site) block(t *testing.T, zone, client string) {
	t.Helper()
	query := url.Values{"key": {client}, "for": {"1h"}, "reason": {"scraper"}}
	r, err := http.NewRequest(http.MethodPost, s.page+"rate_limit/blocks/"+zone+"?"+query.Encode(), nil)
	must(t, err)
	r.Header.Set("X-Rate-Limit-Page", "1")
	resp, err := s.client.Do(r)
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
	b.do(reveal, chromedp.Evaluate[chromedp.Void](`document.activeElement.blur()`), slash)
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
	b.confirms("Reset", `^Empty the bucket of .*greedy.* in zone api`)
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

// reveal makes the page show credentials. A search for #reveal would find the styles, which name it.
var reveal = chromedp.Evaluate[chromedp.Void](`document.getElementById('reveal').click()`)

// confirms answers the page's question with the keyboard.
func (b *browser) confirms(verb, question string) {
	b.t.Helper()
	b.await("the question", `document.getElementById('confirm').open && document.activeElement.id === 'confirm-no' && /`+question+`/.test(document.getElementById('confirm-text').textContent)`)
	b.do(chromedp.KeyEvent("\t"))
	b.await("the button "+verb, `document.activeElement.id === 'confirm-yes' && document.activeElement.textContent === '`+verb+`'`)
	b.do(chromedp.KeyEvent("\r"))
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
	b.confirms("Block", `^Refuse all requests of .*greedy.* in zone api for an hour`)
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
		b.losesNothing(scheme)
		dark := `getComputedStyle(document.body).backgroundColor.match(/\d+/g).every(n => n < 64)`
		if b.is(dark) != (scheme == "dark") {
			b.t.Errorf("%s: the background is not", scheme)
		}
		b.isLegible(scheme)
	}
}

// losesNothing requires that nothing is wider than the page, cut off or scrolled.
func (b *browser) losesNothing(when string) {
	b.t.Helper()
	b.await(when+": the charts fit", `[...document.querySelectorAll('.uplot')].every(e => e.getBoundingClientRect().right <= innerWidth)`)
	if wide := run[string](b, `[...document.querySelectorAll('body, body *')].filter(e => e.checkVisibility() && !e.closest('.uplot, .unseen') && (e.getBoundingClientRect().right > innerWidth + 1 || e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.matches('input')))
		.map(e => e.outerHTML.slice(0, 200)).join('; ')`); wide != "" {
		b.t.Errorf("%s: wider than the page is %s", when, wide)
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
	if !b.is(`[...document.querySelectorAll('input, select, button, summary, meter, [role=img]')].filter(e => e.checkVisibility()).every(e => (e.getAttribute('aria-label') || e.textContent || (e.labels && e.labels[0] && e.labels[0].textContent) || '').trim() && (e.tagName !== 'INPUT' && e.tagName !== 'SELECT' || e.labels.length))`) {
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
	for range run[int](b, `document.querySelectorAll('input, select, button, summary, [tabindex="0"]').length`) {
		b.do(chromedp.KeyEvent("\t"))
		at := run[string](b, `((e) => (e.closest("[id]") || e).id + " " + e.textContent.trim().slice(0, 5))(document.activeElement)`)
		if strings.HasPrefix(at, "zones api") {
			at = "zones api"
		}
		reached[at] = true
		if !b.is(`document.activeElement === document.body || getComputedStyle(document.activeElement).outlineStyle !== 'none' && parseFloat(getComputedStyle(document.activeElement).outlineWidth) >= 2`) {
			b.t.Errorf("the focus on %s is not visible", at)
		}
	}
	for _, name := range []string{"name", "find Find", "results {head", "found Reset", "found Block", "found Grant", "top {head", "near {head", "overrides {head", "overrides End", "stores defau", "zone-filter ", "range ", "open-all Open ", "zones api"} {
		if !reached[name] {
			b.t.Errorf("the keyboard does not reach %s, only %v", name, reached)
		}
	}
}
