package service

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"connectrpc.com/connect"
	commonv3 "github.com/envoyproxy/go-control-plane/envoy/extensions/common/ratelimit/v3"
	ratelimitv3 "github.com/envoyproxy/go-control-plane/envoy/service/ratelimit/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/telemetry"
	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// The types of limitv1 are made by protoc (of Debian's packages protobuf-compiler and libprotobuf-dev) with
// protoc-gen-go, which `go install google.golang.org/protobuf/cmd/protoc-gen-go` makes in the version of go.mod.
//
//go:generate protoc --go_out=. --go_opt=paths=source_relative limitv1/limit.proto

// limitService begins the paths of the calls of limitv1.
const limitService = "/shardlimit.limit.v1.LimitService/"

// What the calls may have.
const (
	maxRequestID = 128
	minTTL       = time.Second
	maxTTL       = store.MaxRecordLeft
	defaultTTL   = time.Minute
	// keptFor is how long an answer is kept at least, for calls that are repeated.
	keptFor = 10 * time.Minute
)

// invalid is the error of a call that cannot be made.
func invalid(format string, args ...any) error {
	return connect.NewError(connect.CodeInvalidArgument, fmt.Errorf(format, args...))
}

// take answers a call of Take.
func (s *Service) take(ctx context.Context, asked *limitv1.TakeRequest) (*limitv1.TakeResponse, error) {
	ctx, end := s.joined(ctx)
	defer end()
	answer := new(limitv1.TakeResponse)
	c, err := s.newCall(ctx, asked.GetDomain(), asked.GetDescriptors())
	if err != nil {
		return nil, err
	}
	id := ""
	if asked.GetRequestId() != "" {
		if id, err = s.recordID(ctx, asked); err != nil {
			return nil, err
		}
	}
	// What holds nothing needs no record.
	if id == "" || len(c.items) == 0 {
		if err := c.decideOrFail(); err != nil {
			return nil, err
		}
		answer.Code, answer.Statuses = c.code(), c.statuses()
		return answer, nil
	}
	digest, err := c.digest("take", asked)
	if err != nil {
		return nil, err
	}
	err = s.once(ctx, id, digest, answer, func(int64) (*record, error) {
		return c.hold(keptFor, answer, func() { answer.Code, answer.Statuses = c.code(), c.statuses() })
	})
	return answer, err
}

// joined returns a context that ends with the call's, or with the service if that ends first, so that nothing
// waits for room without a caller.
func (s *Service) joined(ctx context.Context) (joined context.Context, end func()) {
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(s.life, cancel)
	return ctx, func() {
		stop()
		cancel()
	}
}

// reserve answers a call of Reserve.
func (s *Service) reserve(ctx context.Context, asked *limitv1.ReserveRequest) (*limitv1.ReserveResponse, error) {
	ttl, err := ttlOf(asked)
	if err != nil {
		return nil, err
	}
	ctx, end := s.joined(ctx)
	defer end()
	c, err := s.newCall(ctx, asked.GetDomain(), asked.GetDescriptors())
	if err != nil {
		return nil, err
	}
	for i := range c.items {
		if c.items[i].Always || c.items[i].Postpaid {
			return nil, invalid("zone %s is charged in any case, by what was used, so nothing is reserved there: call Take", c.items[i].Zone.Name)
		}
	}
	for i := range c.items {
		c.items[i].Reserves = true
	}
	id, err := s.recordID(ctx, asked)
	if err != nil {
		return nil, err
	}
	answer := new(limitv1.ReserveResponse)
	if len(c.items) == 0 {
		// What holds nothing needs no record.
		if err := c.decideOrFail(); err != nil {
			return nil, err
		}
		answer.Code, answer.Statuses = c.code(), c.statuses()
		return answer, nil
	}
	digest, err := c.digest("reserve", asked)
	if err != nil {
		return nil, err
	}
	err = s.once(ctx, id, digest, answer, func(now int64) (*record, error) {
		began, asked := time.UnixMicro(now), s.limiter.Now()
		r, err := c.hold(ttl, answer, func() {
			if answer.Code, answer.Statuses = c.code(), c.statuses(); !c.isRefused && c.isLimited() {
				// It may have waited for room.
				began = began.Add(s.limiter.Now().Sub(asked))
				answer.ExpiresAt = timestamppb.New(began.Add(ttl))
			}
		})
		if r != nil {
			r.Phase, r.Outcome, r.Began = open, "", began.UnixMicro()
		}
		return r, err
	})
	return answer, err
}

// commit answers a call of Commit.
func (s *Service) commit(ctx context.Context, asked *limitv1.CommitRequest) (*limitv1.CommitResponse, error) {
	for i, hits := range asked.GetHits() {
		if hits > store.MaxEvents {
			return nil, invalid("hits[%d] is %d: it must be at most 2^52", i, hits)
		}
	}
	id, err := s.recordID(ctx, asked)
	if err != nil {
		return nil, err
	}
	r, err := s.finish(ctx, id, committed, func(r *record) ([]int64, error) { return r.costs(asked.GetHits()) })
	if err != nil {
		return nil, err
	}
	return &limitv1.CommitResponse{Settlements: r.settlements()}, nil
}

// release answers a call of Release.
func (s *Service) release(ctx context.Context, asked *limitv1.ReleaseRequest) (*limitv1.ReleaseResponse, error) {
	id, err := s.recordID(ctx, asked)
	if err != nil {
		return nil, err
	}
	r, err := s.finish(ctx, id, released, func(r *record) ([]int64, error) { return make([]int64, len(r.Holds)), nil })
	if err != nil {
		return nil, err
	}
	return &limitv1.ReleaseResponse{Settlements: r.settlements()}, nil
}

// renew answers a call of Renew.
func (s *Service) renew(ctx context.Context, asked *limitv1.RenewRequest) (*limitv1.RenewResponse, error) {
	ttl, err := ttlOf(asked)
	if err != nil {
		return nil, err
	}
	id, err := s.recordID(ctx, asked)
	if err != nil {
		return nil, err
	}
	until, err := s.prolong(ctx, id, ttl)
	if err != nil {
		return nil, err
	}
	return &limitv1.RenewResponse{ExpiresAt: timestamppb.New(until)}, nil
}

// ttlOf returns how long a reservation is to be open.
func ttlOf(asked interface{ GetTtl() *durationpb.Duration }) (time.Duration, error) {
	ttl := defaultTTL
	if asked.GetTtl() != nil {
		ttl = asked.GetTtl().AsDuration()
	}
	if ttl < minTTL || ttl > maxTTL {
		return 0, invalid("ttl is %s: it must be from %s to %s", ttl, minTTL, maxTTL)
	}
	return ttl, nil
}

// ownMark begins the request_id in the ID of a record. No request_id has the line feed.
const ownMark = "\n:"

// recordID returns the ID of the record of a call. The IDs that callers choose are apart by domain, which shares the
// room for records with others, and by the name of the client certificate.
func (s *Service) recordID(ctx context.Context, asked interface {
	GetDomain() string
	GetRequestId() string
}) (string, error) {
	if err := checkID(asked.GetRequestId()); err != nil {
		return "", err
	}
	domain := asked.GetDomain()
	switch _, isKnown := s.domains[domain]; {
	case isKnown:
	case domain != "":
		return "", invalid("domain %q is unknown: name one of the service's config", clipped(domain))
	case len(s.Domains) > 1:
		return "", invalid("domain is empty, and the service has several: send that of the reservation")
	default:
		domain = s.Domains[0].Name
	}
	id := idPrefix + shortDigest(domain) + ownMark
	if caller, _ := ctx.Value(callerKey{}).(string); caller != "" {
		id = idPrefix + shortDigest(domain) + "\n" + shortDigest(caller) + ownMark
	}
	return id + asked.GetRequestId(), nil
}

// shortDigest keeps names of any length short.
func shortDigest(name string) string {
	sum := sha256.Sum256([]byte(name))
	return base64.RawURLEncoding.EncodeToString(sum[:9])
}

// callerKey is the key of the name of the caller's certificate in the context of a call.
type callerKey struct{}

// withCaller adds the name of the client certificate to a request's context. A certificate that is renewed keeps its
// name.
func withCaller(r *http.Request) *http.Request {
	if r.TLS == nil || len(r.TLS.PeerCertificates) == 0 {
		return r
	}
	of := r.TLS.PeerCertificates[0]
	name := "subject " + of.Subject.String()
	switch {
	case len(of.URIs) > 0:
		name = "URI " + of.URIs[0].String()
	case len(of.DNSNames) > 0:
		name = "DNS " + of.DNSNames[0]
	}
	return r.WithContext(context.WithValue(r.Context(), callerKey{}, name))
}

// checkID returns an error unless id can be the ID of a request.
func checkID(id string) error {
	switch {
	case id == "":
		return invalid("request_id is empty: send one that no other request has")
	case len(id) > maxRequestID:
		return invalid("request_id has %d bytes: it must have at most %d", len(id), maxRequestID)
	case !utf8.ValidString(id) || slices.ContainsFunc([]rune(id), unicode.IsControl):
		return invalid("request_id has control characters: send printable ones")
	}
	return nil
}

// digest identifies what the call asks, and where it counts: another service may have the same domains, and other
// zones.
func (c *call) digest(kind string, asked proto.Message) (string, error) {
	text, err := proto.MarshalOptions{Deterministic: true}.Marshal(asked)
	if err != nil {
		return "", connect.NewError(connect.CodeInvalidArgument, err)
	}
	of := fmt.Appendf(nil, "%s %q", kind, c.service.limiter.Store.Name)
	for _, n := range c.nodes {
		zone := ""
		if n != nil {
			zone = strings.Join(n.names(), " ")
		}
		of = fmt.Appendf(of, " %q", zone)
	}
	sum := sha256.Sum256(append(of, text...))
	return hex.EncodeToString(sum[:16]), nil
}

// newCall reads what a call asks: the same as one of Envoy's with these descriptors.
func (s *Service) newCall(ctx context.Context, domain string, descriptors []*limitv1.Descriptor) (*call, error) {
	asked := &ratelimitv3.RateLimitRequest{Domain: domain}
	for i, d := range descriptors {
		if d.GetHits() > store.MaxEvents {
			return nil, invalid("descriptors[%d].hits is %d: it must be at most 2^52", i, d.GetHits())
		}
		one := new(commonv3.RateLimitDescriptor)
		for _, e := range d.GetEntries() {
			one.Entries = append(one.Entries, &commonv3.RateLimitDescriptor_Entry{Key: e.GetKey(), Value: e.GetValue()})
		}
		if d != nil && d.Hits != nil {
			one.HitsAddend = wrapperspb.UInt64(d.GetHits())
		}
		asked.Descriptors = append(asked.Descriptors, one)
	}
	c := &call{service: s, ctx: ctx, asked: asked}
	if err := c.read(); err != nil {
		return nil, connect.NewError(connect.CodeInvalidArgument, err)
	}
	return c, nil
}

// decideOrFail decides the call. It is an error if a store cannot answer, and on_error is deny.
func (c *call) decideOrFail() error {
	if err := c.decide(); err != nil {
		if connect.CodeOf(err) == connect.CodeCanceled && c.service.life.Err() != nil {
			return connect.NewError(connect.CodeUnavailable, errors.New("the config of the service has ended: try again"))
		}
		return err
	}
	for i := range c.decisions {
		if d := &c.decisions[i]; d.Outcome == telemetry.ErrorRefused {
			return connect.NewError(connect.CodeUnavailable, fmt.Errorf("the store of zone %s cannot answer, and on_error is deny: try again", d.Zone.Name))
		}
	}
	return nil
}

// isLimited reports whether a zone limits a descriptor of the call, once it is decided.
func (c *call) isLimited() bool {
	return slices.ContainsFunc(c.places, func(place int) bool { return place >= 0 })
}

// hold decides the call, fills its answer, and returns the record of what it holds then, as that of a Take, or
// nil if it was refused or nothing limits it. It ends while it waits if its caller leaves, and from the take on no more.
func (c *call) hold(ttl time.Duration, answer proto.Message, fill func()) (*record, error) {
	for i := range c.items {
		c.items[i].Exactly = true
	}
	if err := c.decideOrFail(); err != nil {
		return nil, err
	}
	if fill(); c.isRefused && !c.hasReports() || !c.isRefused && !c.isLimited() {
		return nil, nil
	}
	text, err := proto.Marshal(answer)
	if err != nil {
		return nil, connect.NewError(connect.CodeInternal, err)
	}
	r := &record{Phase: done, Outcome: taken, TTL: ttl, Answer: text}
	if c.isRefused {
		// A call that is repeated must not report twice.
		return r, nil
	}
	holds := map[int]int{}
	item := 0
	for _, n := range c.nodes {
		if n == nil || len(n.zones) == 0 {
			r.Parts = append(r.Parts, part{Hold: -1})
			continue
		}
		for i := range n.zones {
			u := part{Hold: -1}
			if place := c.places[item]; place >= 0 {
				u = r.partOf(c.passage, place, holds)
				u.Hits, u.Cost = c.items[item].Hits, c.items[item].Cost
			}
			u.IsMore = i > 0
			item++
			r.Parts = append(r.Parts, u)
		}
	}
	return r, nil
}

// partOf returns that of a descriptor whose bucket has that place. Descriptors that meet in one bucket have
// one hold.
func (r *record) partOf(p *limiter.Passage, place int, holds map[int]int) part {
	i, isKnown := holds[place]
	if !isKnown {
		i = -1
		if h, counts := p.Hold(place); counts {
			i = len(r.Holds)
			r.Holds = append(r.Holds, h)
		}
		holds[place] = i
	}
	return part{Hold: i}
}

// code returns what is decided of the call.
func (c *call) code() limitv1.Code {
	if c.isRefused {
		return limitv1.Code_OVER_LIMIT
	}
	return limitv1.Code_OK
}

// statuses returns those of the descriptors, in their order.
func (c *call) statuses() (all []*limitv1.Status) {
	item := 0
	for _, n := range c.nodes {
		st := &limitv1.Status{Code: limitv1.Code_OK}
		switch {
		case n == nil || n.Unlimited:
		case n.Denied:
			st.Code = limitv1.Code_OVER_LIMIT
		case len(n.zones) > 0:
			i := c.telling(item, len(n.zones))
			st = c.limitStatus(n.zones[i-item].Name, i)
			item += len(n.zones)
		}
		all = append(all, st)
	}
	return all
}

// limitStatus returns the status of the descriptor that asks the item of a zone.
func (c *call) limitStatus(zone string, item int) *limitv1.Status {
	switch {
	case c.isDenied:
		return &limitv1.Status{Zone: zone}
	case c.places[item] < 0:
		return &limitv1.Status{Code: limitv1.Code_OK}
	}
	d := &c.decisions[c.places[item]]
	st := &limitv1.Status{Code: limitv1.Code(codes[d.Outcome]), Zone: zone}
	if d.State.Now == 0 {
		return st
	}
	st.Limit, st.Remaining = uint64(max(d.State.Limit, 0)), uint64(max(d.State.Remaining, 0))
	if left := d.State.Reset - d.State.Now; left > 0 {
		st.UntilReset = durationpb.New(time.Duration(left) * time.Microsecond)
	}
	if wait := d.State.RetryAfter; wait > 0 && wait != store.Never && st.Code == limitv1.Code_OVER_LIMIT {
		st.RetryAfter = durationpb.New(wait)
	}
	return st
}
