package service

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"

	"connectrpc.com/connect"
	"github.com/caddyserver/caddy/v2"
	"github.com/caddyserver/caddy/v2/modules/caddyhttp"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"go.uber.org/zap"
	"golang.org/x/net/http/httpguts"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// procedure is the path of the calls.
const procedure = "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit"

// What a call may have. A message of that size takes a few MB of memory, whatever is in it.
const (
	maxMessage     = 64 << 10
	maxDescriptors = 100
)

// remoteAddress is the key with which Envoy sends the address of a client.
const remoteAddress = "remote_address"

// shouldRateLimit answers a call.
func (s *Service) shouldRateLimit(ctx context.Context, r *connect.Request[ratelimitv3.RateLimitRequest]) (*connect.Response[ratelimitv3.RateLimitResponse], error) {
	c := call{service: s, ctx: ctx, asked: r.Msg}
	if err := c.read(); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	if err := c.decide(); err != nil {
		return nil, err
	}
	return connect.NewResponse(c.answer()), nil
}

// recovered reports a panic, as the server does for others.
func (s *Service) recovered(_ context.Context, _ connect.Spec, _ http.Header, reason any) error {
	s.logger.Error("a call of the rate limit service panicked", zap.Any("reason", reason), zap.Stack("stack"))
	return connect.NewError(connect.CodeInternal, errors.New("internal error"))
}

// call is one call, from its message to its answer.
type call struct {
	service *Service
	ctx     context.Context
	asked   *ratelimitv3.RateLimitRequest

	// nodes are those to which the descriptors lead, nil where one leads nowhere.
	nodes []*node
	// items are what the descriptors with a zone ask, in their order.
	items []limiter.Item
	// isDenied is set if a descriptor is always refused. Then no zone is asked.
	isDenied bool

	// passage is that of the items, once it was decided.
	passage *limiter.Passage
	// places are those of the items in decisions, or -1.
	places    []int
	decisions []limiter.Decision
	isRefused bool
	header    header
}

// read finds what the call asks. An error says what is wrong with the message.
func (c *call) read() error {
	domain, descriptors := c.asked.GetDomain(), c.asked.GetDescriptors()
	tree, isKnown := c.service.domains[domain]
	switch {
	case domain == "":
		return errors.New("domain is empty: name one of the service's config")
	case !isKnown:
		return fmt.Errorf("domain %q is unknown: name one of the service's config", clipped(domain))
	case len(descriptors) == 0:
		return errors.New("descriptors is empty: send at least one")
	case len(descriptors) > maxDescriptors:
		return fmt.Errorf("descriptors has %d, and a call may have at most %d: make several calls", len(descriptors), maxDescriptors)
	}
	for i, d := range descriptors {
		if err := c.readDescriptor(tree, d); err != nil {
			return fmt.Errorf("descriptors[%d]%w", i, err)
		}
	}
	return nil
}

func (c *call) readDescriptor(tree level, d *commonv3.RateLimitDescriptor) error {
	if len(d.GetEntries()) == 0 {
		return errors.New(" has no entries: send at least one")
	}
	for j, e := range d.GetEntries() {
		if e.GetKey() == "" {
			return fmt.Errorf(".entries[%d] has an empty key: send one", j)
		}
	}
	if d.GetLimit() != nil {
		c.service.warnOfLimit(c.asked.GetDomain(), d)
	}
	hits, err := hitsOf(d, c.asked.GetHitsAddend())
	if err != nil {
		return err
	}
	n := tree.find(d.GetEntries())
	c.nodes = append(c.nodes, n)
	if n == nil {
		return nil
	}
	c.isDenied = c.isDenied || n.Denied
	for _, z := range n.zones {
		if hits < 0 && !z.CanGiveBack() {
			return fmt.Errorf(".is_negative_hits: zone %s keeps events one by one, and does not know which to give back: count it by another algorithm", z.Name)
		}
		c.items = append(c.items, limiter.Item{Zone: z, Request: c.request(d), Hits: hits, Always: n.Always, Postpaid: n.Postpaid})
	}
	return nil
}

// warnOfLimit warns that a descriptor's own limit has no effect: callers name clients, and not their limits.
func (s *Service) warnOfLimit(domain string, d *commonv3.RateLimitDescriptor) {
	times, log := s.limitsIgnored.Report(s.limiter.Now())
	if !log {
		return
	}
	s.logger.Warn("the limit of a descriptor is ignored, because limits are the service's: send the number as an entry, and write events {rate_limit_service.<key>} <n> into the zone",
		zap.String("domain", domain), zap.String("key", clipped(d.GetEntries()[0].GetKey())), zap.Int64("times", times))
}

// hitsOf returns the hits of a descriptor: its own, which may be 0, or those of the call, of which none are
// one.
func hitsOf(d *commonv3.RateLimitDescriptor, ofCall uint32) (int64, error) {
	hits := uint64(max(ofCall, 1))
	if own := d.GetHitsAddend(); own != nil {
		hits = own.GetValue()
	}
	switch {
	case hits > store.MaxEvents:
		return 0, fmt.Errorf(".hits_addend is %d: it must be at most 2^52", hits)
	case d.GetIsNegativeHits():
		return -int64(hits), nil
	}
	return int64(hits), nil
}

// request returns the request that a zone sees of a descriptor.
func (c *call) request(d *commonv3.RateLimitDescriptor) *http.Request {
	r := &http.Request{
		Method: http.MethodPost, URL: &url.URL{Path: "/"}, Proto: "HTTP/2.0", ProtoMajor: 2,
		Header: http.Header{}, Body: http.NoBody, Host: c.asked.GetDomain(),
	}
	address := ""
	for _, e := range d.GetEntries() {
		if httpguts.ValidHeaderFieldName(e.GetKey()) && httpguts.ValidHeaderFieldValue(e.GetValue()) {
			r.Header.Add(e.GetKey(), e.GetValue())
		}
		if e.GetKey() == remoteAddress && address == "" {
			address = e.GetValue()
			r.RemoteAddr = net.JoinHostPort(address, "0")
		}
	}
	repl := caddy.NewReplacer()
	r = caddyhttp.PrepareRequest(r.WithContext(c.ctx), repl, &c.header, nil)
	caddyhttp.SetVar(r.Context(), caddyhttp.ClientIPVarKey, address)
	repl.Map(func(name string) (any, bool) {
		if name == limiter.Descriptor {
			return textOf(d.GetEntries()), true
		}
		key, is := strings.CutPrefix(name, limiter.DescriptorPrefix)
		if !is {
			return nil, false
		}
		return valueOf(d.GetEntries(), key), true
	})
	return r
}

// escaped makes texts of entries unambiguous.
var escaped = strings.NewReplacer("%", "%25", "=", "%3D", ",", "%2C")

// textOf returns all of a descriptor, such as "path=/login,remote_address=192.0.2.7".
func textOf(entries []*commonv3.RateLimitDescriptor_Entry) string {
	var b strings.Builder
	for i, e := range entries {
		if i > 0 {
			b.WriteByte(',')
		}
		_, _ = escaped.WriteString(&b, e.GetKey())
		b.WriteByte('=')
		_, _ = escaped.WriteString(&b, e.GetValue())
	}
	return b.String()
}

// valueOf returns the value of the entry with a key or, if there are several, their values in one text.
func valueOf(entries []*commonv3.RateLimitDescriptor_Entry, key string) string {
	var values []string
	for _, e := range entries {
		if e.GetKey() == key {
			values = append(values, e.GetValue())
		}
	}
	if len(values) == 1 {
		return values[0]
	}
	for i := range values {
		values[i] = escaped.Replace(values[i])
	}
	return strings.Join(values, ",")
}

// hasReports reports whether an item reports what was used, which is charged even if the call is refused.
func (c *call) hasReports() bool { return slices.ContainsFunc(c.items, isReport) }

func isReport(i limiter.Item) bool { return i.Postpaid && i.Hits > 0 }

// decide asks all zones in one step, and settles.
func (c *call) decide() error {
	if !c.isDenied {
		return c.ask(c.items)
	}
	var reports []limiter.Item
	for _, i := range c.items {
		if isReport(i) {
			i.Always, i.Postpaid = true, false
			reports = append(reports, i)
		}
	}
	// The answer shows nothing of it.
	of := call{service: c.service, ctx: c.ctx}
	err := of.ask(reports)
	c.isRefused = true
	return err
}

// ask asks the zones of the items in one step, and settles.
func (c *call) ask(items []limiter.Item) error {
	if len(items) == 0 {
		return nil
	}
	p := limiter.NewPassage(&c.header)
	c.passage = p
	var err error
	if c.places, err = p.MeetEach(c.service.limiter, items); err != nil {
		if why := new(caddyhttp.HandlerError); errors.As(err, why) {
			err = why.Err
		}
		return connect.NewError(connect.CodeInvalidArgument, err)
	}
	// A store may panic: then the call settles as one that failed, and leaves the stores.
	status := http.StatusInternalServerError
	defer func() { p.End(status, 0) }()
	refusal := p.Ask(nil)
	if err := c.ctx.Err(); err != nil && refusal != 0 {
		status = refusal
		if errors.Is(err, context.DeadlineExceeded) {
			return connect.NewError(connect.CodeDeadlineExceeded, err)
		}
		return connect.NewError(connect.CodeCanceled, err)
	}
	c.isRefused = refusal != 0
	if status = refusal; !c.isRefused {
		status = http.StatusOK
	}
	p.End(status, 0)
	p.Decisions(func(d limiter.Decision) { c.decisions = append(c.decisions, d) })
	return nil
}

// header is the header that the limiter sets. Nothing else is written.
type header struct{ fields http.Header }

// Header implements [http.ResponseWriter].
func (h *header) Header() http.Header {
	if h.fields == nil {
		h.fields = http.Header{}
	}
	return h.fields
}

// Write implements [http.ResponseWriter].
func (*header) Write(b []byte) (int, error) { return len(b), nil }

// WriteHeader implements [http.ResponseWriter].
func (*header) WriteHeader(int) {}

// clipped returns the beginning of a text that the caller chose.
func clipped(text string) string {
	const most = 64
	if len(text) <= most {
		return text
	}
	return text[:most] + "..."
}

// small is the number as the protocol has it.
func small(n int64) uint32 { return uint32(min(max(n, 0), math.MaxUint32)) }
