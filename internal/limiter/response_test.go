package limiter

import (
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/store"
)

const (
	usageCost = "{http.rate_limit.response.json.usage.n}"
	sizeCost  = "{http.rate_limit.response.size}"
	timeCost  = "{http.rate_limit.response.duration_ms}"
)

// chain is what answers a request behind the limiter.
type chain = func(w http.ResponseWriter, r *http.Request) error

// jsonAnswer answers with a body, of a type and with other header fields.
func jsonAnswer(kind, body string, fields ...string) chain {
	return func(w http.ResponseWriter, _ *http.Request) error {
		w.Header().Set("Content-Type", kind)
		for i := 0; i < len(fields); i += 2 {
			w.Header().Set(fields[i], fields[i+1])
		}
		_, err := io.WriteString(w, body)
		return err
	}
}

// costAtEnd returns what a request is charged by a zone whose cost is known at the end, with the
// fallback 7, the status and size of the answer, and what is logged.
func costAtEnd(t *testing.T, cost, method string, answer chain) (charged []string, logs *observer.ObservedLogs) {
	t.Helper()
	s := &deafStore{}
	l := newTestHandler(t, &Zone{Cost: Quantity{Text: cost, Number: 7}, SettleAtEnd: true}, s)
	core, logs := observer.New(zapcore.WarnLevel)
	l.Logger = zap.New(core)
	serve(l, method, answer)
	return s.asked, logs
}

// serve serves a request by l in front of a chain, which may panic. The request's context ends
// with its variable leave.
func serve(l *Limiter, method string, answer chain) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	ctx, cancel := context.WithCancel(context.WithValue(context.Background(), leaveKey{}, new(func())))
	defer cancel()
	*ctx.Value(leaveKey{}).(*func()) = cancel
	r := caddyhttp.PrepareRequest(httptest.NewRequest(method, "/", nil).WithContext(ctx), caddy.NewReplacer(), w, nil)
	defer func() { _ = recover() }()
	_ = l.ServeHTTP(w, r, caddyhttp.HandlerFunc(answer))
	return w
}

type leaveKey struct{}

// leave ends the connection of a request.
func leave(r *http.Request) { (*r.Context().Value(leaveKey{}).(*func()))() }

func gzipped(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = io.WriteString(w, text)
	w.Close()
	return b.String()
}

// flushed is the beginning of a compressed body, up to a flush.
func flushed(text string) string {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	_, _ = io.WriteString(w, text)
	_ = w.Flush()
	return b.String()
}

// TestCostsOfResponses: what a client causes, and what a backend sends, and what it is charged.
func TestCostsOfResponses(t *testing.T) {
	const usage = `{"usage": {"n": 42}}`
	const small = `{"usage": {"n": 2}}`
	for name, test := range map[string]struct {
		cost, method string
		answer       chain
		want         int64
		cause        string
	}{
		"read":                      {usageCost, "GET", jsonAnswer("application/json", usage), 42, ""},
		"read, less than fallback":  {usageCost, "GET", jsonAnswer("application/json", small), 2, ""},
		"compressed":                {usageCost, "GET", jsonAnswer("application/json", gzipped(usage), "Content-Encoding", "gzip"), 42, ""},
		"event stream":              {usageCost, "GET", jsonAnswer("text/event-stream", "data: "+small+"\r\rdata: [DONE]\r\r"), 2, ""},
		"sum":                       {usageCost + " + 0.5*" + sizeCost, "GET", jsonAnswer("application/json", usage+" "), 42 + 11, ""},
		"beyond the largest":        {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": 1e30}}`), 1 << 52, ""},
		"not found":                 {usageCost, "GET", jsonAnswer("application/json", `{"usage": null}`), 7, "not_found"},
		"empty":                     {usageCost, "GET", jsonAnswer("application/json", ""), 7, "not_found"},
		"head":                      {usageCost, "HEAD", jsonAnswer("application/json", usage), 7, "not_found"},
		"not JSON":                  {usageCost, "GET", jsonAnswer("text/html", usage), 7, "not_json"},
		"spoilt JSON":               {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": 42}, oops`), 42, "not_json"},
		"spoilt JSON, less":         {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": 2}, oops`), 7, "not_json"},
		"unknown encoding":          {usageCost, "GET", jsonAnswer("application/json", usage, "Content-Encoding", "compress"), 7, "encoding"},
		"not compressed":            {usageCost, "GET", jsonAnswer("application/json", usage, "Content-Encoding", "gzip"), 7, "encoding"},
		"out of range":              {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": -5}}`), 7, "out_of_range"},
		"out of range, and spoilt":  {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": -5}, oops`), 7, "out_of_range"},
		"sum, a part is missing":    {usageCost + " + " + sizeCost, "GET", jsonAnswer("application/json", `{"usage": null}`), 15, "not_found"},
		"torn off":                  {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": 42}, "text": "abc`), 42, "broken_off"},
		"torn off, less":            {usageCost, "GET", jsonAnswer("application/json", `{"usage": {"n": 2}, "text": "abc`), 7, "broken_off"},
		"torn off, compressed":      {usageCost, "GET", jsonAnswer("application/json", gzipped(usage)[:20], "Content-Encoding", "gzip"), 7, "broken_off"},
		"shorter than declared":     {usageCost, "GET", jsonAnswer("text/event-stream", "data: "+small+"\n\n", "Content-Length", "1000"), 7, "broken_off"},
		"whole, before a panic":     {usageCost, "GET", panicsAfter(jsonAnswer("application/json", small)), 2, ""},
		"stream, before a panic":    {usageCost, "GET", panicsAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\n")), 7, "broken_off"},
		"more, before a panic":      {usageCost, "GET", panicsAfter(jsonAnswer("text/event-stream", "data: "+usage+"\n\n")), 42, "broken_off"},
		"stream that was left":      {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\n")), 7, "broken_off"},
		"whole, then left":          {usageCost, "GET", leftAfter(jsonAnswer("application/json", small)), 2, ""},
		"last event, then left":     {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata: [DONE]\n\n")), 2, ""},
		"last event, half a line":   {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata:[DONE]")), 2, ""},
		"last event, then a panic":  {usageCost, "GET", panicsAfter(leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata: [DONE]\n\n"))), 2, ""},
		"last event, then an error": {usageCost, "GET", failsAfter(leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata: [DONE]\n\n"))), 2, ""},
		"last event, encoding":      {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", flushed("data: "+small+"\n\ndata: [DONE]\n\n"), "Content-Encoding", "gzip")), 2, ""},
		"last event, nothing found": {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: {}\n\ndata: [DONE]\n\n")), 7, "not_found"},
		"last event, and another":   {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: [DONE]\n\ndata: "+small+"\n\n")), 7, "broken_off"},
		"last event, cut":           {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata: [DON")), 7, "broken_off"},
		"last event, in a text":     {usageCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata: {\"text\": \"[DONE]\"}\n\n")), 7, "broken_off"},
		"last event, and a size":    {usageCost + " + " + sizeCost, "GET", leftAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\ndata: [DONE]\n\n")), 2 + 41, ""},
		"part":                      {usageCost, "GET", withStatus(http.StatusPartialContent, jsonAnswer("application/json", small)), 7, "broken_off"},
		"part, more":                {usageCost, "GET", withStatus(http.StatusPartialContent, jsonAnswer("application/json", usage)), 42, "broken_off"},
		"no content":                {usageCost, "GET", withStatus(http.StatusNoContent, jsonAnswer("", "")), 7, "not_found"},
		"not modified":              {usageCost, "GET", withStatus(http.StatusNotModified, jsonAnswer("", "")), 0, ""},
		"error route":               {usageCost, "GET", failsAfter(nil), 7, "not_found"},
		"error after the beginning": {usageCost, "GET", failsAfter(jsonAnswer("text/event-stream", "data: "+small+"\n\n")), 7, "broken_off"},

		"size":                          {sizeCost, "GET", jsonAnswer("text/plain", "hello"), 5, ""},
		"size of nothing":               {sizeCost, "GET", jsonAnswer("text/plain", ""), 0, ""},
		"size, head":                    {sizeCost, "HEAD", jsonAnswer("text/plain", "hello"), 0, ""},
		"size, part":                    {sizeCost, "GET", withStatus(http.StatusPartialContent, jsonAnswer("text/plain", "hello")), 5, ""},
		"size, no content":              {sizeCost, "GET", withStatus(http.StatusNoContent, jsonAnswer("", "")), 0, ""},
		"size, not modified":            {sizeCost, "GET", withStatus(http.StatusNotModified, jsonAnswer("", "")), 0, ""},
		"size, error route":             {sizeCost, "GET", failsAfter(nil), 7, "not_found"},
		"size, error after beginning":   {sizeCost, "GET", failsAfter(jsonAnswer("text/plain", "hello")), 7, "broken_off"},
		"size, error after much":        {sizeCost, "GET", failsAfter(jsonAnswer("text/plain", "hello, world")), 12, "broken_off"},
		"size, panic at once":           {sizeCost, "GET", panicsAfter(nil), 7, "broken_off"},
		"size, panic after a part":      {sizeCost, "GET", panicsAfter(jsonAnswer("text/plain", "hello")), 5, ""},
		"size, left after a part":       {sizeCost, "GET", leftAfter(jsonAnswer("text/plain", "hello")), 5, ""},
		"size of a text, error, summed": {sizeCost + " + 30", "GET", failsAfter(nil), 30, "not_found"},
		"size, left at once":            {sizeCost, "GET", leftAfter(jsonAnswer("text/plain", "")), 7, "broken_off"},
		"left at once":                  {usageCost, "GET", leftAfter(jsonAnswer("application/json", "")), 7, "broken_off"},
	} {
		t.Run(name, func(t *testing.T) {
			charged, logs := costAtEnd(t, test.cost, test.method, test.answer)
			want := []string{fmt.Sprint("charge ", test.want)}
			if test.want == 0 {
				want = nil
			}
			if fmt.Sprint(charged) != fmt.Sprint(want) {
				t.Errorf("the store was called to %q, want %q", charged, want)
			}
			cause := ""
			if logs.Len() > 0 {
				cause = fmt.Sprint(logs.All()[0].ContextMap()["cause"])
			}
			if logs.Len() > 1 || cause != test.cause {
				t.Errorf("logged %v, want cause %q", logs.All(), test.cause)
			}
		})
	}
}

func panicsAfter(answer chain) chain {
	return func(w http.ResponseWriter, r *http.Request) error {
		if answer != nil {
			_ = answer(w, r)
		}
		panic(http.ErrAbortHandler)
	}
}

func failsAfter(answer chain) chain {
	return func(w http.ResponseWriter, r *http.Request) error {
		if answer != nil {
			_ = answer(w, r)
		}
		return caddyhttp.Error(http.StatusNotFound, errors.New("no such page"))
	}
}

// withStatus sends the status with the header fields of an answer, which a part of the body would
// send otherwise.
func withStatus(status int, answer chain) chain {
	return func(w http.ResponseWriter, r *http.Request) error {
		// Without a body, nothing can be written.
		if err := answer(statusWriter{w, status}, r); !errors.Is(err, http.ErrBodyNotAllowed) {
			return err
		}
		return nil
	}
}

type statusWriter struct {
	http.ResponseWriter
	status int
}

func (w statusWriter) Write(b []byte) (int, error) {
	w.WriteHeader(w.status)
	return w.ResponseWriter.Write(b)
}

func leftAfter(answer chain) chain {
	return func(w http.ResponseWriter, r *http.Request) error {
		err := answer(w, r)
		leave(r)
		return err
	}
}

// TestBodiesBesideSendfile: the server's writer copies what need not be read, and what is of no
// use any more.
func TestBodiesBesideSendfile(t *testing.T) {
	for name, test := range map[string]struct {
		kind  string
		given bool
	}{"JSON": {"application/json", false}, "text": {"text/plain", true}} {
		l := newTestHandler(t, &Zone{Cost: Quantity{Text: usageCost, Number: 7}, SettleAtEnd: true}, &deafStore{})
		below := &readerFromWriter{ResponseRecorder: httptest.NewRecorder()}
		r := caddyhttp.PrepareRequest(httptest.NewRequest("GET", "/", nil), caddy.NewReplacer(), below, nil)
		err := l.ServeHTTP(below, r, caddyhttp.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) error {
			w.Header().Set("Content-Type", test.kind)
			_, err := w.(io.ReaderFrom).ReadFrom(strings.NewReader(`{"usage": {"n": 1}}`))
			return err
		}))
		if err != nil || below.Body.Len() != 19 || (below.given != nil) != test.given {
			t.Errorf("%s: %v, %d bytes, given to the server: %v", name, err, below.Body.Len(), below.given != nil)
		}
	}
}

// TestDurationLeavesOutTheLimiter: the time in which a request waits for the answer of a store or in
// a line is no part of its duration, in whichever handler.
func TestDurationLeavesOutTheLimiter(t *testing.T) {
	now := time.Now()
	pass := func(d time.Duration) { now = now.Add(d) }
	s := &deafStore{}
	outer := newTestHandler(t, &Zone{Cost: Quantity{Text: timeCost, Number: 7}, SettleAtEnd: true}, slowStore{s, func() { pass(3 * time.Second) }})
	inner := newTestHandler(t, &Zone{}, slowStore{&deafStore{}, func() { pass(5 * time.Second) }})
	inner.Zones[0].Name = "inner"
	outer.Now = func() time.Time { return now }
	inner.Now = outer.Now
	serve(outer, "GET", func(w http.ResponseWriter, r *http.Request) error {
		pass(100 * time.Millisecond)
		return inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(func(http.ResponseWriter, *http.Request) error {
			pass(20 * time.Millisecond)
			return nil
		}))
	})
	if err := s.wasAsked("charge 120"); err != nil {
		t.Error(err)
	}
}

// slowStore is a deafStore that lets time pass before it answers.
type slowStore struct {
	*deafStore
	wait func()
}

func (s slowStore) Check(ctx context.Context, asks []*store.Ask) {
	s.wait()
	s.deafStore.Check(ctx, asks)
}

// TestBodiesOfRefusedRequestsAreLeft: an inner handler refuses, and what then passes is neither read
// nor charged.
func TestBodiesOfRefusedRequestsAreLeft(t *testing.T) {
	s := &deafStore{}
	outer := newTestHandler(t, &Zone{Cost: Quantity{Text: usageCost, Number: 7}, SettleAtEnd: true}, s)
	inner := newTestHandler(t, &Zone{}, &deafStore{})
	inner.Zones[0].Name, inner.Zones[0].Events = "inner", Quantity{}
	w := serve(outer, "GET", func(w http.ResponseWriter, r *http.Request) error {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Content-Encoding", "gzip")
		err := inner.ServeHTTP(w, r, caddyhttp.HandlerFunc(jsonAnswer("application/json", "")))
		_, _ = io.WriteString(w, gzipped(`{"usage": {"n": 42}}`))
		return err
	})
	if err := s.wasAsked(); err != nil || w.Body.Len() == 0 {
		t.Errorf("%v, %d bytes", err, w.Body.Len())
	}
}

// TestBodiesAreClosed, so that no decoder outlives its request, however that ends.
func TestBodiesAreClosed(t *testing.T) {
	gzip := jsonAnswer("application/json", gzipped(`{"usage": {"n": 42}}`), "Content-Encoding", "gzip")
	for name, answer := range map[string]chain{
		"returned": gzip, "panicked": panicsAfter(gzip), "failed": failsAfter(gzip), "left": leftAfter(gzip),
		"handed over": func(w http.ResponseWriter, r *http.Request) error {
			_ = gzip(w, r)
			_, _, err := http.NewResponseController(w).Hijack()
			return err
		},
		"refused": func(w http.ResponseWriter, r *http.Request) error {
			_ = gzip(w, r)
			trackerOf(r).endBy(verdict{by: trackerOf(r).own[0]})
			return nil
		},
	} {
		var body interface{ Reads() bool }
		l := newTestHandler(t, &Zone{Cost: Quantity{Text: usageCost, Number: 7}, SettleAtEnd: true}, &deafStore{})
		serve(l, "GET", func(w http.ResponseWriter, r *http.Request) error {
			defer func() {
				if body = trackerOf(r).response.body; !body.Reads() {
					t.Errorf("%s: the body is not read", name)
				}
			}()
			return answer(w, r)
		})
		if body.Reads() {
			t.Errorf("%s: the body is not closed", name)
		}
	}
}
