//go:build check

package ui_test

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"image/color"
	"image/png"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/commands/ui"
)

var pictures = flag.String("ui.pictures", "", "write the pictures of the page into this directory, such as docs/img")

// withPast is the admin API of a site, whose history is filled up to an hour as a day's traffic might be:
// the site has run for a moment only.
type withPast struct{ *site }

// Call implements [ui.API].
func (s withPast) Call(ctx context.Context, method, path string, _ []byte) (int, []byte, error) {
	r, err := http.NewRequestWithContext(ctx, method, strings.TrimSuffix(s.page, "/")+path, nil)
	if err != nil {
		return 0, nil, err
	}
	r.Header.Set("X-Rate-Limit-Page", "1")
	resp, err := s.client.Do(r)
	if err != nil {
		return 0, nil, err
	}
	defer resp.Body.Close()
	answer, err := io.ReadAll(resp.Body)
	if err == nil && strings.Contains(path, "/history?") {
		answer, err = fillPast(answer)
	}
	return resp.StatusCode, answer, err
}

func fillPast(answer []byte) ([]byte, error) {
	var all adminapi.History
	if err := json.Unmarshal(answer, &all); err != nil {
		return nil, err
	}
	for _, z := range all.Zones {
		random := rand.New(rand.NewPCG(1, uint64(len(z.Zone))))
		for i := range z.Allowed {
			wave, noise := 1+0.3*math.Sin(float64(i)/45), 0.9+0.2*random.Float64()
			requests := 1500 * wave * noise
			refused := 0.12 * requests * noise
			if z.Zone != "api" {
				requests, refused = requests/8, 0
			}
			if i > 200 && i < 240 { // somebody asks too much
				refused *= 4
			}
			z.Allowed[i], z.Refused[i], z.WouldRefuse[i], z.Unchecked[i], z.Waited[i] = math.Round(requests), math.Round(refused), 0, 0, 0
			z.StoreCalls[i], z.StoreLatency[i] = requests, 0.0004*wave*noise
		}
	}
	return json.Marshal(all)
}

// TestPicture takes the pictures of the page for the documentation, in both color schemes,
// and in the dark one with a problem.
func TestPicture(t *testing.T) {
	t.Parallel()
	const client = "mobile-app"
	s := startSite(t, "10s")
	defer s.load(t, client)()
	s.block(t, "api", "price-scraper")
	l, err := ui.Listen(t.Context(), "127.0.0.1:0")
	must(t, err)
	go func() { _ = ui.Serve(t.Context(), l, ui.Handler(withPast{s}, l.Addr().(*net.TCPAddr))) }()
	page := fmt.Sprintf("http://%s/", l.Addr())
	b := startBrowser(t, page)
	b.do(chromedp.EmulateViewport(1200, 1000), chromedp.Navigate(page))
	ended := make(chan struct{})
	defer func() { <-ended }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		defer close(ended)
		s.nearTheLimit(ctx, t, "partner-7")
	}()
	b.await("charts of an hour", `[...document.querySelectorAll('#zones .chart')].length === 2 && [...document.querySelectorAll('#zones .chart')].every(e => /last hour: \d\d/.test(e.getAttribute('aria-label')))`)
	b.do(chromedp.SendKeys("#name", client+"\r"))
	b.await("a client near its limit, and what was searched for", `document.querySelector('#near tr') && document.querySelector('#results tbody tr')`)
	for _, picture := range []struct{ scheme, file string }{{"light", "ui.png"}, {"dark", "ui-dark.png"}} {
		scheme, file := picture.scheme, picture.file
		if scheme == "dark" {
			must(t, s.replica.Kill())
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
