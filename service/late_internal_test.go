package service

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"connectrpc.com/connect"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
	"github.com/shardlimit/caddy-shardlimit/store"
)

func (f fixture) reserveOpen(hits uint64) {
	f.Helper()
	_, err := f.reserve(f.Context(), f.reserving(hits))
	f.must("reserve", err)
}

func (f fixture) committing(hits uint64) error {
	_, err := f.commit(f.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{hits}})
	return err
}

// leave puts a record in the state in which a Caddy leaves it that has died.
func (f fixture) leave(change func(r *record) *record, left time.Duration) {
	f.Helper()
	at, r := f.there()
	_, err := f.put(f.Context(), at, change(r), left)
	f.must("put", err)
}

func (f fixture) refuses(what string, err error, code connect.Code) {
	f.Helper()
	if connect.CodeOf(err) != code {
		f.Errorf("%s: %v, want %v", what, err, code)
	}
}

// TestLateCommit charges in full what has expired, once, however far the expiry is.
func TestLateCommit(t *testing.T) {
	expire := func(phase phase) func(r *record) *record {
		return func(r *record) *record {
			r = r.ended(expired, costless(r))
			r.Phase = phase
			return r
		}
	}
	for name, x := range map[string]struct {
		prepare func(f fixture)
		// less and more are left after a commit of 10 and of 50, of 100 with a reservation of 30.
		less, more uint64
	}{
		"due":          {func(f fixture) { f.leave(func(r *record) *record { return r }, 0) }, 90, 50},
		"written down": {func(f fixture) { f.leave(expire(owing), time.Hour) }, 90, 50},
		// Its estimate stays charged, because it may have been given back.
		"dead while it was given back": {func(f fixture) { f.leave(expire(settling), 0) }, 60, 20},
		"given back": {func(f fixture) {
			f.leave(func(r *record) *record { return r }, 0)
			f.must("sweep", f.sweep(f.Context()))
			f.wantLeft("expired", 100)
		}, 90, 50},
		// Nobody knows whether the estimate is charged, so it is not given back.
		"not taken": {func(f fixture) {
			f.leave(func(r *record) *record {
				r.Holds[0].IsTaken = false
				return r
			}, 0)
			f.must("sweep", f.sweep(f.Context()))
		}, 70, 50},
	} {
		for hits, want := range map[uint64]uint64{10: x.less, 50: x.more} {
			t.Run(fmt.Sprint(name, hits), func(t *testing.T) {
				f := newFixture(t)
				f.reserveOpen(30)
				x.prepare(f)
				f.must("commit", f.committing(hits))
				f.wantLeft("committed", want)
				f.must("commit again", f.committing(hits))
				f.refuses("commit otherwise", f.committing(60), connect.CodeAlreadyExists)
				_, err := f.release(t.Context(), &limitv1.ReleaseRequest{RequestId: f.user})
				f.refuses("release", err, connect.CodeFailedPrecondition)
				f.must("sweep", f.sweep(t.Context()))
				f.wantLeft("in the end", want)
				if at, r := f.there(); r.Phase != done || at.Left < keptFor-time.Minute {
					t.Errorf("it is %+v for %s", r, at.Left)
				}
			})
		}
	}
}

// TestLateCommitWaits for the Caddy that gives back, and its caller may leave.
func TestLateCommitWaits(t *testing.T) {
	f := newFixture(t)
	f.reserveOpen(30)
	f.leave(func(r *record) *record {
		r = r.ended(expired, costless(r))
		r.Phase = settling
		return r
	}, time.Hour)
	ctx, leave := context.WithCancel(t.Context())
	leave()
	_, err := f.commit(ctx, &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{50}})
	f.refuses("a caller that leaves", err, connect.CodeUnavailable)
	ended := make(chan error)
	go func() { ended <- f.committing(50) }()
	f.leave(func(r *record) *record {
		r.Phase, r.Owed = done, []int64{0}
		return r
	}, time.Hour)
	f.must("commit", <-ended)
	f.wantLeft("the estimate, which the test does not give back, and the commit", 20)
}

// TestLateEnds: what was released stays so, and a late Release is the expiry.
func TestLateEnds(t *testing.T) {
	f := newFixture(t)
	f.reserveOpen(30)
	f.leave(func(r *record) *record { return r }, 0)
	f.must("sweep", f.sweep(t.Context()))
	for range 2 {
		_, err := f.release(t.Context(), &limitv1.ReleaseRequest{RequestId: f.user})
		f.must("release", err)
	}
	f.refuses("commit what was released", f.committing(5), connect.CodeFailedPrecondition)
	f.wantLeft("released", 100)
	at, _ := f.there()
	_, err := f.put(t.Context(), at, nil, 0)
	f.must("forget", err)
	f.refuses("commit what is forgotten", f.committing(5), connect.CodeNotFound)
}

// TestCommitRacesWithExpiry: whichever is first, the committed cost is charged once.
func TestCommitRacesWithExpiry(t *testing.T) {
	for n := range 20 {
		f := newFixture(t)
		f.user += fmt.Sprint(n)
		f.reserveOpen(30)
		f.leave(func(r *record) *record { return r }, 0)
		var all sync.WaitGroup
		all.Go(func() { f.look(t.Context(), func(err error) { f.must("sweep", err) }) })
		for range 3 {
			all.Go(func() {
				if err := f.committing(45); err != nil {
					t.Errorf("commit: %v", err)
				}
			})
		}
		all.Wait()
		f.dealing.Wait()
		f.wantLeft("committed", 55)
	}
}

// TestOldRecords of version 0.1.0 are ended, and what it has given back is not committed, because it kept too little.
func TestOldRecords(t *testing.T) {
	for _, hasExpired := range []bool{false, true} {
		f := newFixture(t)
		f.user += fmt.Sprint(hasExpired)
		f.reserveOpen(30)
		at, r := f.there()
		_, err := f.put(t.Context(), at, nil, 0)
		f.must("remove", err)
		if r.Began = 0; hasExpired {
			text := fmt.Sprintf(`{"phase": "done", "outcome": "expired", "digest": %q, "parts": [{"hold": 0}], "holds": [{"limit": {"Zone": "reservations"}, "cost": 30, "taken": true}], "charged": [0]}`, r.Digest)
			f.must("put", f.records(true, func(kept store.Records) error {
				_, err := kept.PutRecord(t.Context(), store.Record{ID: oldPrefix + f.user, Value: text, Left: time.Hour})
				return err
			}))
			f.refuses("commit", f.committing(10), connect.CodeFailedPrecondition)
			continue
		}
		_, err = f.put(t.Context(), store.Record{ID: oldPrefix + f.user}, r, time.Minute)
		f.must("put", err)
		_, err = f.renew(t.Context(), &limitv1.RenewRequest{RequestId: f.user})
		f.must("renew", err)
		f.must("commit", f.committing(10))
		f.wantLeft("committed", 90)
		f.must("commit again", f.committing(10))
	}
}

// TestRenew keeps a reservation open, shortens nothing, and for a day at most.
func TestRenew(t *testing.T) {
	f := newFixture(t)
	renew := func(ttl time.Duration) (time.Duration, error) {
		a, err := f.renew(t.Context(), &limitv1.RenewRequest{RequestId: f.user, Ttl: durationpb.New(ttl)})
		return time.Until(a.GetExpiresAt().AsTime()), err
	}
	about := func(what string, ttl, want time.Duration) {
		t.Helper()
		left, err := renew(ttl)
		f.must(what, err)
		if at, _ := f.there(); left > want || left < want-time.Minute || at.Left > want || at.Left < want-time.Minute {
			t.Errorf("%s: %s are left, and %s", what, left, at.Left)
		}
	}
	_, err := renew(time.Minute)
	f.refuses("nothing", err, connect.CodeNotFound)
	f.reserveOpen(30)
	about("an hour", time.Hour, time.Hour)
	about("less", time.Second, time.Hour)
	for _, ttl := range []time.Duration{time.Second - 1, time.Hour + 1} {
		_, err := renew(ttl)
		f.refuses(ttl.String(), err, connect.CodeInvalidArgument)
	}
	since := func(ago time.Duration) {
		f.leave(func(r *record) *record {
			r.Began = time.Now().Add(-ago).UnixMicro()
			return r
		}, 0)
	}
	since(maxOpen - 10*time.Minute)
	about("the rest of a day", time.Hour, 10*time.Minute)
	since(maxOpen)
	_, err = renew(time.Hour)
	f.refuses("more than a day", err, connect.CodeFailedPrecondition)
	f.wantLeft("all the time", 70)
	f.must("commit", f.committing(40))
	_, err = renew(time.Minute)
	f.refuses("what has ended", err, connect.CodeFailedPrecondition)
	f.must("take", func() error {
		_, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", RequestId: "taken" + f.user, Descriptors: f.descriptors(1)})
		return err
	}())
	f.user = "taken" + f.user
	_, err = renew(time.Minute)
	f.refuses("a Take", err, connect.CodeFailedPrecondition)
}

// TestRequestIDsAreApart by domain and by the name of the client certificate, which a renewed one keeps.
func TestRequestIDsAreApart(t *testing.T) {
	s := provisioned(t, `{
		"domains": [{"name": "a", "descriptors": [{"key": "k", "zone": "apart"}]}, {"name": "b", "descriptors": [{"key": "k", "zone": "apart"}]}],
		"zones": [{"name": "apart", "events": 100, "window": "10000h"}]}`)
	call := func(name, body string, certificate *x509.Certificate) (int, string) {
		r := httptest.NewRequest(http.MethodPost, limitService+name, strings.NewReader(body))
		r.Header.Set("Content-Type", "application/json")
		if certificate != nil {
			r.TLS = &tls.ConnectionState{PeerCertificates: []*x509.Certificate{certificate}}
		}
		w := serve(t, s, r)
		return w.Code, w.Body.String()
	}
	named := func(serial byte, uri, dns, subject string) *x509.Certificate {
		c := &x509.Certificate{Raw: []byte{serial}, Subject: pkix.Name{CommonName: subject}}
		if uri != "" {
			u, err := url.Parse(uri)
			if err != nil {
				t.Fatal(err)
			}
			c.URIs = []*url.URL{u}
		}
		if dns != "" {
			c.DNSNames = []string{dns}
		}
		return c
	}
	callers := []*x509.Certificate{
		nil, named(1, "spiffe://x/a", "a.test", "a"), named(2, "spiffe://x/b", "a.test", "a"), named(3, "", "a.test", "a"),
		named(4, "", "b.test", "a"), named(5, "", "", "a"), named(6, "", "", "b"), named(7, "", "spiffe://x/a", ""), named(8, "", "", ""),
	}
	type place struct {
		domain string
		caller int
	}
	var places []place
	for i := range callers {
		places = append(places, place{"a", i}, place{"b", i})
	}
	for i, p := range places {
		body := fmt.Sprintf(`{"domain": %q, "requestId": "x", "descriptors": [{"entries": [{"key": "k", "value": "v%d"}], "hits": 9}]}`, p.domain, i)
		if code, text := call("Reserve", body, callers[p.caller]); code != http.StatusOK {
			t.Errorf("%v: reserve: %d %s", p, code, text)
		}
	}
	for _, p := range places {
		asked := fmt.Sprintf(`{"domain": %q, "requestId": "x"}`, p.domain)
		who := callers[p.caller]
		if who != nil {
			renewed := *who
			renewed.Raw = []byte{100}
			who = &renewed
		}
		for _, name := range []string{"Renew", "Release", "Release"} {
			if code, text := call(name, asked, who); code != http.StatusOK {
				t.Errorf("%v: %s: %d %s", p, name, code, text)
			}
		}
	}
	for _, name := range []string{"Commit", "Release", "Renew"} {
		for body, want := range map[string]string{
			`{"requestId": "x"}`:                `domain is empty, and the service has several`,
			`{"domain": "c", "requestId": "x"}`: `domain \"c\" is unknown`,
			`{"domain": "a", "requestId": "y"}`: `no reservation has this request_id`,
		} {
			if code, text := call(name, body, nil); code == http.StatusOK || !strings.Contains(text, want) {
				t.Errorf("%s %s: %d %s", name, body, code, text)
			}
		}
	}
}

// TestWhatHoldsNothingHasNoRecord, and nothing is written for it; what a zone that observes does not count has one.
func TestWhatHoldsNothingHasNoRecord(t *testing.T) {
	s := provisioned(t, `{
		"domains": [{"name": "a", "descriptors": [{"key": "free", "unlimited": true}, {"key": "k", "zone": "nothing"}, {"key": "w", "zone": "watched"}]}],
		"zones": [{"name": "nothing", "events": 100, "window": "1h"}, {"name": "watched", "events": 1, "window": "1h", "enforce": 0}]}`)
	f := fixture{t, s, t.Name()}
	opened := s.limiter.Store.EnterOpen()
	if opened == nil {
		var err error
		opened, err = s.limiter.Store.Enter()
		f.must("enter", err)
	}
	defer s.limiter.Store.Leave()
	kept := opened.Operable
	opened.Operable = unwritable{kept, errors.New("something is written")}
	defer func() { opened.Operable = kept }()
	for _, key := range []string{"free", "unknown"} {
		asked := &limitv1.ReserveRequest{Domain: "a", RequestId: key + f.user, Descriptors: []*limitv1.Descriptor{{Entries: []*limitv1.Entry{{Key: key, Value: "x"}}}}}
		a, err := f.reserve(t.Context(), asked)
		f.must("reserve", err)
		if a.GetCode() != limitv1.Code_OK || a.GetExpiresAt() != nil {
			t.Errorf("%s: %v", key, a)
		}
		_, err = f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", RequestId: key + f.user, Descriptors: asked.GetDescriptors()})
		f.must("take", err)
		asked.RequestId = "\x00"
		_, err = f.reserve(t.Context(), asked)
		f.refuses("an ID that none can have", err, connect.CodeInvalidArgument)
	}
	opened.Operable = kept
	for range 2 {
		f.user += "w"
		_, err := f.reserve(t.Context(), &limitv1.ReserveRequest{Domain: "a", RequestId: f.user, Descriptors: []*limitv1.Descriptor{{Entries: []*limitv1.Entry{{Key: "w", Value: "x"}}}}})
		f.must("reserve", err)
		f.must("commit what is observed", f.committing(1))
	}
}

// TestDomainLeavesRoomToOthers: one that fills the records cannot keep another from reserving.
func TestDomainLeavesRoomToOthers(t *testing.T) {
	s := provisioned(t, `{
		"domains": [{"name": "filled", "descriptors": [{"key": "k", "zone": "room"}]}, {"name": "other", "descriptors": [{"key": "k", "zone": "room"}]}],
		"zones": [{"name": "room", "events": 100, "window": "1h"}]}`)
	f := fixture{t, s, t.Name()}
	reserve := func(domain, id string) error {
		asked := f.reserving(0)
		asked.Domain, asked.RequestId = domain, id
		_, err := f.reserve(t.Context(), asked)
		return err
	}
	id, err := s.recordID(t.Context(), &limitv1.ReleaseRequest{Domain: "filled", RequestId: "x"})
	f.must("ID", err)
	f.must("fill", f.records(true, func(kept store.Records) (err error) {
		large := strings.Repeat("x", store.MaxRecord)
		for n := 0; ; n++ {
			r, err := kept.PutRecord(t.Context(), store.Record{ID: fmt.Sprint(id, n), Value: large, Left: time.Hour})
			if errors.Is(err, store.ErrRecordsFull) {
				break
			}
			f.must("put", err)
			// Other tests use the store.
			defer func() {
				r.Value = ""
				_, err := kept.PutRecord(t.Context(), r)
				f.must("remove", err)
			}()
			if n%100 == 0 {
				f.must("another domain", reserve("other", fmt.Sprint(n)))
			}
		}
		full := error(nil)
		for n := 0; full == nil && n < 100; n++ {
			full = reserve("filled", fmt.Sprint(n))
		}
		f.refuses("the domain that fills it", full, connect.CodeResourceExhausted)
		return reserve("other", "last")
	}))
	f.must("once there is room again", reserve("filled", "again"))
}
