//go:build check

package ui_test

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/chromedp/chromedp/kb"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// busy is the status of a Caddy with eight zones, the fifth of which lets requests pass unlimited.
func busy(passed int64) adminapi.Status {
	st := adminapi.Status{
		Instances: []adminapi.Instance{{Name: "web-1", Version: "v1.2.3", Uptime: 7200}, {Name: "web-2", Address: "10.0.0.2:2019", Version: "v1.2.3", Uptime: 90}},
		Problems:  []adminapi.Problem{}, Stores: []adminapi.Store{},
	}
	for i := range 8 {
		zone := scriptedZone("default", nil)
		zone.Name, zone.Events = fmt.Sprint("zone-", i), "10000"
		if i == 4 {
			zone.Decisions["error_allowed"] = passed
		}
		st.Zones = append(st.Zones, zone)
	}
	return st
}

// texts are those of the elements that a selector finds and that are shown, one a line.
func (b *browser) texts(selector string) string {
	b.t.Helper()
	return run[string](b, `[...document.querySelectorAll("`+selector+`")].filter(e => e.checkVisibility()).map(e => e.textContent).join("\n")`)
}

func (b *browser) wantTexts(what, selector, want string) {
	b.t.Helper()
	b.await(what+": "+want, fmt.Sprintf(`[...document.querySelectorAll(%q)].filter(e => e.checkVisibility()).map(e => e.textContent).join("\n") === %q`, selector, want))
}

// hover moves the mouse to the middle of an element.
func hover(b *browser, selector string) {
	b.t.Helper()
	at := run[[]float64](b, fmt.Sprintf(`(e => { e.scrollIntoView({block: "center"}); const r = e.getBoundingClientRect(); return [r.right - 2, r.top + r.height / 2] })(document.querySelector(%q))`, selector))
	b.do(chromedp.Func(func(ctx context.Context, tab *chromedp.Target) error {
		_, err := cdp.Call(ctx, tab, input.DispatchMouseEvent, input.DispatchMouseEventParams{Type: input.DispatchMouseEventTypeMouseMoved, X: at[0], Y: at[1]})
		return err
	}))
}

// TestCharts show the last hour at once, values where the mouse is, and another range when it is chosen.
func TestCharts(t *testing.T) {
	t.Parallel()
	api, page := startScripted(t)
	last := map[string]float64{"allowed": 12340, "refused": 5, "waited": 20, "store_calls": 9, "store_latency": 0.0025}
	api.answer("GET history?range=1h&zone=api", scriptedHistory("1h", last))
	release := api.answerLater("GET history?range=24h&zone=api", scriptedHistory("24h", last))
	defer release()
	api.answer("GET history?range=1w&zone=api", scriptedHistory("1w", last))
	b := startBrowser(t, page)
	b.do(chromedp.EmulateViewport(1000, 900), chromedp.Navigate(page))
	label := func(want string) {
		t.Helper()
		b.await(want, fmt.Sprintf(`document.querySelector('[data-zone=api] .chart').getAttribute('aria-label') === %q`, want))
	}
	label("Requests of zone api in the last hour: 24,680 allowed, at most 1,234 a second; 10 refused, at most 0.5 a second; 40 held by max_wait, at most 2.0 a second; calls of the store took at most 2.5 ms")
	if !b.is(`(c => { const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; return d.some(n => n > 0) })(document.querySelector('[data-zone=api] canvas'))`) {
		t.Error("nothing is drawn")
	}
	// Series without values are not in the legend.
	b.wantTexts("the legend", ".u-legend .u-label", "Time\nallowed\nrefused\nheld by max_wait\nstore latency")
	hover(b, "[data-zone=api] .u-over")
	b.await("the values where the mouse is", `/\d:\d\d/.test(document.querySelector('.u-legend .u-value').textContent) && [...document.querySelectorAll('.u-legend .u-value')].filter(e => e.checkVisibility()).slice(1).map(e => e.textContent).join(' ') === '1,234/s 0.5/s 2.0/s 2.5 ms'`)
	// An answer about a range that is no longer chosen comes too late.
	b.do(chromedp.Click("#range [value='24h']"))
	b.awaitCalls(api, "GET history?range=24h&zone=api", 1)
	b.do(chromedp.Click("#range [value='1w']"))
	label("Requests of zone api in the last week: 24,680 allowed, at most 82.3 a second; 10 refused, at most 0.0 a second; 40 held by max_wait, at most 0.1 a second; calls of the store took at most 2.5 ms")
	// A pixel of a week is several steps.
	b.do(chromedp.Evaluate[chromedp.Void](`(chart => chart.setCursor({left: chart.over.clientWidth, top: 10}))([...cards.values()][0].chart)`))
	b.await("that the last step is not over", `/\d:\d\d.*, until now$/.test(document.querySelector('.u-legend .u-value').textContent)`)
	release()
	b.received("history?range=24h&zone=api", 1)
	if label := b.is(`/ last week: /.test(document.querySelector('[data-zone=api] .chart').getAttribute('aria-label'))`); !label {
		t.Error("an older range replaced a newer one")
	}
	b.satisfied("charts")
}

// TestManyZones: the summary names the Caddys, zones with trouble come first, and they can be opened,
// closed and filtered. Only those that are open are asked for.
func TestManyZones(t *testing.T) {
	t.Parallel()
	api, page := startScripted(t)
	var passed atomic.Int64
	api.answerWith("GET ", func() (int, any) {
		return http.StatusOK, busy(passed.Add(50))
	})
	history := func(names ...int) string {
		query := "GET history?range=1h"
		all := scriptedHistory("1h", nil)
		of := all.Zones[0]
		all.Zones = nil
		for _, n := range names {
			of.Zone = fmt.Sprint("zone-", n)
			query += "&zone=" + of.Zone
			all.Zones = append(all.Zones, of)
		}
		api.answer(query, all)
		return query
	}
	first := history(0, 1, 2, 3, 4, 5)
	b := startBrowser(t, page)
	b.do(chromedp.EmulateViewport(1000, 900), chromedp.Navigate(page))
	b.wantTexts("the Caddys", "#instances li", "web-1, version v1.2.3, up 2 h\nweb-2 (10.0.0.2:2019), version v1.2.3, up 1.5 min")
	b.wantTexts("the summary", "#summary", "8 zones, trouble in zone-4")
	order := func(what string, want ...int) {
		t.Helper()
		var names []string
		for _, n := range want {
			names = append(names, fmt.Sprint("zone-", n))
		}
		b.wantTexts(what, "#zones h3", strings.Join(names, "\n"))
	}
	order("trouble first", 4, 0, 1, 2, 3, 5, 6, 7)
	b.await("what the trouble is", `document.querySelector('[data-zone=zone-4] .trouble').textContent === 'passes unlimited' && /^[1-9].*s pass unlimited/.test(document.querySelector('[data-zone=zone-4] .unchecked').textContent)`)
	b.await("six open", `document.querySelectorAll('#zones details[open] canvas').length === 6 && document.querySelectorAll('#zones details[open]').length === 6`)
	if text := b.texts("[data-zone=zone-0] p"); !strings.HasPrefix(text, "10,000 per 1 min") {
		t.Errorf("zone-0 is described by %q", text)
	}
	if api.count(first) == 0 {
		t.Error("the six zones were not asked for together")
	}
	// The keyboard closes a zone, and the page leaves it closed.
	history(7)
	b.do(chromedp.SendKeys("#zone-filter", "E-7"))
	order("filtered", 7)
	b.wantTexts("how many", "#zones-note", "1 of 8 zones")
	b.do(focus("[data-zone=zone-7] summary"), chromedp.KeyEvent("\r"))
	b.await("it is drawn", `document.querySelector('[data-zone=zone-7] canvas')`)
	b.do(chromedp.SendKeys("#zone-filter", "x"))
	b.wantTexts("none", "#zones-note", "Nothing found: no zone has that in its name.")
	history(0, 1, 2, 3, 4, 5, 7)
	b.do(chromedp.Evaluate[chromedp.Void](`for (const e of [document.getElementById('zone-filter')]) { e.value = ''; e.dispatchEvent(new Event('input')) }`))
	order("all again", 4, 0, 1, 2, 3, 5, 6, 7)
	b.do(chromedp.Click("#close-all"))
	b.await("all closed", `document.querySelectorAll('#zones details[open]').length === 0`)
	// The trouble ends, and the focus stays.
	b.do(focus("[data-zone=zone-4] summary"))
	api.answer("GET ", busy(passed.Load()))
	order("in the order of the config", 0, 1, 2, 3, 4, 5, 6, 7)
	b.wantTexts("the summary without trouble", "#summary", "8 zones, none in trouble")
	b.await("the focus", `document.activeElement.parentElement.dataset.zone === 'zone-4'`)
	history(0, 1, 2, 3, 4, 5, 6, 7)
	b.do(chromedp.Click("#open-all"))
	b.await("all open", `document.querySelectorAll('#zones details[open] canvas').length === 8`)
	b.satisfied("many zones")
	b.do(chromedp.EmulateViewport(360, 740, chromedp.EmulateMobile))
	b.losesNothing("many zones on a phone")
}

// TestLists sorts, filters and pages a list, shows how much of a limit is used, and credentials only when
// asked for. On a phone it loses nothing of it.
func TestLists(t *testing.T) {
	t.Parallel()
	api, page := startScripted(t)
	near, top := adminapi.Near{Zone: "api"}, adminapi.Top{Zone: "api", Since: 300}
	for i := range 25 {
		client := scriptedClient(fmt.Sprintf("sk-secret-%02d", i))
		near.Clients = append(near.Clients, adminapi.NearClient{Client: client, Store: "default", Limit: 2000, Used: 1600 + int64(i), Reset: 4e9})
		address := adminapi.Client{ClientKey: fmt.Sprint("ip:10.0.0.", i), Template: "{client_ip}", Values: []string{fmt.Sprint("10.0.0.", i)}}
		top.Refused = append(top.Refused, adminapi.RefusedClient{Client: address, Store: "default", Count: int64(1000 + i), LastRefused: 1e9})
	}
	api.answer("GET near?n=100", adminapi.Nears{Zones: []adminapi.Near{near}})
	api.answer("GET top?n=100", adminapi.Tops{Zones: []adminapi.Top{top}})
	b := startBrowser(t, page)
	b.do(chromedp.EmulateViewport(1000, 900), chromedp.Navigate(page))
	b.wantTexts("a page", "[data-list=near] .pager span", "1–10 of 25")
	used := func(what string, want ...int) {
		t.Helper()
		var all []string
		for _, n := range want {
			all = append(all, fmt.Sprintf("1,6%02d of 2,000", n))
		}
		b.wantTexts(what, "#near td:nth-child(4)", strings.Join(all, "\n"))
	}
	used("the most used first", 24, 23, 22, 21, 20, 19, 18, 17, 16, 15)
	if !b.is(`(m => m.value === 1624 && m.max === 2000 && m.getAttribute('aria-label') === '81% used')(document.querySelector('#near meter'))`) {
		t.Error("the bar is wrong")
	}
	// Credentials.
	if text := b.texts("#near td.name"); !strings.Contains(text, "{header.X-Key} 'sk-s…24'") || b.is(`/secret/.test(document.body.innerText)`) || b.is(`[...document.querySelectorAll('[aria-label]')].some(e => /secret/.test(e.getAttribute('aria-label')))`) {
		t.Errorf("credentials are shown: %s", text)
	}
	if text := b.texts("#top td.name"); !strings.Contains(text, "10.0.0.24") {
		t.Errorf("addresses are not shown: %s", text)
	}
	b.do(reveal)
	b.await("credentials", `document.querySelector('#near td.name').textContent === '{header.X-Key} sk-secret-24' && document.getElementById('reveal').getAttribute('aria-pressed') === 'true'`)
	next, previous := "[data-list=near] .pager button:last-child", "[data-list=near] .pager button:first-child"
	b.do(focus(next), chromedp.KeyEvent("\r"), chromedp.KeyEvent("\r"))
	used("the last page", 4, 3, 2, 1, 0)
	b.await("no page after it", `document.querySelector('`+next+`').disabled && !document.querySelector('`+previous+`').disabled`)
	head := "[data-list=near] th:nth-child(4)"
	b.do(focus(head+" button"), chromedp.KeyEvent("\r"))
	used("the least used first", 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
	b.await("it says so", `document.querySelector('`+head+`').getAttribute('aria-sort') === 'ascending'`)
	b.do(chromedp.SendKeys("[data-list=near] input", "SECRET-1"))
	used("what has the text", 10, 11, 12, 13, 14, 15, 16, 17, 18, 19)
	b.do(chromedp.SendKeys("[data-list=near] input", "9"))
	used("one", 19)
	b.do(chromedp.SendKeys("[data-list=near] input", "9"))
	b.wantTexts("none", "[data-list=near] .pager span", "Nothing found")
	b.satisfied("lists")
	b.do(chromedp.EmulateViewport(360, 740, chromedp.EmulateMobile))
	b.losesNothing("lists on a phone")
	b.await("each cell with its column", `(cells => cells.length === 4 && cells.every(td => td.dataset.label && getComputedStyle(td, '::before').content === '"' + td.dataset.label + '"'))([...document.querySelectorAll('#top tr:first-child td')].filter(e => e.checkVisibility()))`)
	if n := len(strings.Split(b.texts("[data-list=top] th button"), "\n")); n != 4 {
		t.Errorf("on a phone a list can be sorted by %d columns", n)
	}
}

// TestSearch finds clients by how they begin, and says when there are none. What a question is answered
// with no does not happen.
func TestSearch(t *testing.T) {
	t.Parallel()
	api, page := startScripted(t)
	nothing := scriptedBuckets("al")
	nothing.Buckets[0].Servers[0].State = nil
	api.answer("GET clients?name=al", adminapi.Found{Zones: []adminapi.Buckets{nothing}})
	matches := adminapi.Matches{More: true}
	for i, name := range []string{"alice", "albert"} {
		matches.Clients = append(matches.Clients, adminapi.Match{Zone: "api", NearClient: adminapi.NearClient{Client: scriptedClient(name), Store: "default", Limit: 10, Used: int64(i + 3)}})
	}
	api.answer("GET clients?prefix=al", matches)
	api.answer("GET "+bucketTarget("alice"), scriptedBuckets("alice"))
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page), chromedp.SendKeys("#name", "al\r"))
	b.wantTexts("those that begin so first", "#results tbody td:nth-child(4)", "3 of 10\n4 of 10\nnothing")
	b.wantTexts("that there are more", "#results p", "More begin so: write more of the name.")
	b.do(chromedp.Click("#results tbody button"))
	b.await("the bucket", `document.querySelector('#found button')`)
	for _, button := range []string{"Reset", "Block"} {
		for _, no := range []chromedp.Action[chromedp.Void]{chromedp.KeyEvent(kb.Escape), chromedp.KeyEvent("\r")} {
			b.do(focus("#found [aria-label^="+button+"]"), chromedp.KeyEvent("\r"))
			b.await("the question", `document.getElementById('confirm').open`)
			b.do(no)
			b.await("no question, and the bucket", `!document.getElementById('confirm').open && document.querySelector('#found button') && document.activeElement.textContent === '`+button+`'`)
		}
	}
	b.await("no report", `document.getElementById('done').textContent === ''`)

	api.answer("GET clients?name=nobody", adminapi.Found{Zones: []adminapi.Buckets{nothing}})
	b.do(chromedp.SetValue("#name", "nobody"), chromedp.SendKeys("#name", "\r"))
	b.wantTexts("nothing", "#results p", "Nothing found: no client of this name has a count, and this Caddy knows of none whose name begins so.")
	if n := api.count("DELETE " + bucketTarget("alice")); n != 0 {
		t.Error("the bucket was reset")
	}
	b.satisfied("search")
}

// TestCaddyIsGone: the page says so, and of when what it shows is, until Caddy is back.
func TestCaddyIsGone(t *testing.T) {
	t.Parallel()
	api, page := startScripted(t)
	back := busy(0)
	api.answerWith("GET ", errorAnswer("no Caddy there"))
	b := startBrowser(t, page)
	b.do(chromedp.Navigate(page))
	b.wantTexts("at first", "#as-of", "Nothing is known of it yet. The page goes on asking.")
	api.answer("GET ", back)
	b.await("the zones", `document.querySelectorAll('#zones details').length === 8 && !document.body.classList.contains('gone')`)
	api.answerWith("GET ", errorAnswer("no Caddy there"))
	b.await("when that was", `/^What you see is from .*\d:\d\d.*, until Caddy answers again.$/.test(document.getElementById('as-of').textContent) && document.getElementById('as-of').checkVisibility()`)
	b.wantTexts("the state", "#state", "Caddy is gone")
	b.wantTexts("the error", "#error", "no Caddy there")
	if !b.is(`document.body.classList.contains('gone') && getComputedStyle(document.querySelector('section:not([hidden])')).borderStyle === 'dashed'`) {
		t.Error("what is old looks as what is new")
	}
	b.isLegible("without Caddy")
	b.do(chromedp.SendKeys("#name", "x\r"))
	b.await("the search says so too", `document.querySelector('#results .bad')`)
	api.answer("GET ", back)
	api.answer("GET clients?"+url.Values{"name": {"x"}}.Encode(), adminapi.Found{Zones: []adminapi.Buckets{}})
	b.await("back", `document.getElementById('as-of').hidden && !document.body.classList.contains('gone')`)
}
