//go:build check

package ui_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"

	"github.com/chromedp/chromedp"
)

// otherSite is a page that tries to reset a client through the user's browser, in every
// way that a page has, and shows what succeeded.
const otherSite = `<!DOCTYPE html><title>trying</title><body><script>
const target = %q, calls = [
	() => fetch(target, {method: "DELETE"}),
	() => fetch(target, {method: "DELETE", headers: {"X-Rate-Limit-Page": "1"}}),
	() => fetch(target, {method: "DELETE", mode: "no-cors"}),
	() => fetch(target, {headers: {"X-Rate-Limit-Page": "1"}}),
	async () => { if ((await fetch(target, {mode: "no-cors"})).type !== "opaque") return; throw new Error("opaque"); },
];
(async () => {
	let could = 0;
	for (const call of calls) try { await call(); could++ } catch {}
	const frame = document.createElement("iframe");
	frame.src = %q;
	const loaded = new Promise(resolve => frame.onload = resolve);
	document.body.append(frame);
	await loaded;
	try { if (frame.contentDocument.body.innerText.includes("Rate limits")) could++ } catch {}
	document.title = "could " + could;
})();
</script>`

// isNotDriven requires that another site's page can neither reset a client nor read the
// server's answers, and then returns to the page.
func (b *browser) isNotDriven(s *site) {
	b.t.Helper()
	key := run[string](b, `document.querySelector('#top button').dataset.client.split(' ').slice(3).join(' ')`)
	target := s.page + "rate_limit/buckets/api?" + url.Values{"client_key": {key}}.Encode()
	// A page of another site, and one of another port of this machine.
	other := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, otherSite, target, s.page)
	}))
	defer other.Close()
	port := other.URL[strings.LastIndexByte(other.URL, ':'):]
	for _, host := range []string{"evil.example", "127.0.0.1", "localhost"} {
		b.do(chromedp.Navigate("http://" + host + port + "/"))
		b.await("the end of the tries of "+host, `document.title.startsWith("could ")`)
		if title := run[string](b, "document.title"); title != "could 0" {
			b.t.Errorf("a page of %s %s", host, title)
		}
	}
	// This server by a name that was bound to its address: the page's script
	// would be of the same origin.
	u, err := url.Parse(s.page)
	must(b.t, err)
	b.do(chromedp.Navigate("http://evil.example:" + u.Port() + "/"))
	if text := run[string](b, "document.body.innerText"); !strings.Contains(text, "is not this server") {
		b.t.Errorf("by another name it says %q", text)
	}
	if status, err := s.ask("/", greedy); err != nil || status != http.StatusTooManyRequests {
		b.t.Errorf("after the tries the greedy client got %d, %v", status, err)
	}
	b.do(chromedp.Navigate(s.page))
	b.await("the page again", `document.querySelector('#top button') && document.querySelector('#name')`)
	b.mu.Lock()
	defer b.mu.Unlock()
	b.complaints = nil // those were the other pages'
}
