package service

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"connectrpc.com/connect"
	"go.uber.org/zap"
	"go.uber.org/zap/zaptest/observer"

	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
	"github.com/shardlimit/caddy-shardlimit/store"
)

const oneZone = `{
	"domains": [{"name": "a", "descriptors": [{"key": "k", "zone": "reservations"}]}],
	"zones": [{"name": "reservations", "events": 100, "window": "10000h"}]}`

// fixture is a service in memory that does not run: nothing is swept unless a test does it.
type fixture struct {
	*testing.T
	*Service
	user string
}

func newFixture(t *testing.T) fixture { return fixture{t, provisioned(t, oneZone), t.Name()} }

func (f fixture) descriptors(hits uint64) []*limitv1.Descriptor {
	return []*limitv1.Descriptor{{Entries: []*limitv1.Entry{{Key: "k", Value: f.user}}, Hits: &hits}}
}

func (f fixture) reserving(hits uint64) *limitv1.ReserveRequest {
	return &limitv1.ReserveRequest{Domain: "a", RequestId: f.user, Descriptors: f.descriptors(hits)}
}

// id is the ID of the record.
func (f fixture) id() string {
	f.Helper()
	id, err := f.recordID(f.Context(), f.reserving(0))
	f.must("ID", err)
	return id
}

// wantLeft requires that so much is left.
func (f fixture) wantLeft(what string, want uint64) {
	f.Helper()
	a, err := f.take(f.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(0)})
	if err != nil || a.GetStatuses()[0].GetRemaining() != want {
		f.Errorf("%s: %v, %v, want %d left", what, a, err, want)
	}
}

func (f fixture) must(what string, err error) {
	f.Helper()
	if err != nil {
		f.Fatalf("%s: %v", what, err)
	}
}

// sweep deals with what is due, and returns an error if there was one.
func (f fixture) sweep(ctx context.Context) (failed error) {
	var mu sync.Mutex
	f.look(ctx, func(err error) {
		mu.Lock()
		defer mu.Unlock()
		failed = cmp.Or(failed, err)
	})
	f.dealing.Wait()
	return failed
}

// logs makes the service write to what it returns.
func (f fixture) logs() *observer.ObservedLogs {
	core, logs := observer.New(zap.DebugLevel)
	f.logger = zap.New(core)
	return logs
}

// there returns the record.
func (f fixture) there() (at store.Record, r *record) {
	f.Helper()
	f.must("read", f.records(true, func(kept store.Records) (err error) {
		at, err = kept.Record(f.Context(), f.id())
		return err
	}))
	if at.Version == "" {
		return at, nil
	}
	r, err := read(at)
	f.must("read", err)
	return at, r
}

// TestWhatIsAcceptedCanEnd: of reservations of any size, those that are kept can be ended.
func TestWhatIsAcceptedCanEnd(t *testing.T) {
	f := newFixture(t)
	_, err := f.reserve(t.Context(), f.reserving(30))
	f.must("reserve", err)
	at, r := f.there()
	for len(r.Holds) < 20 {
		r.Holds = append(r.Holds, r.Holds[0])
	}
	text, err := json.Marshal(r)
	f.must("encode", err)
	kept, refused := 0, 0
	for size := store.MaxRecord - 2000; size <= store.MaxRecord; size += 20 {
		// As base64.
		r.Answer = make([]byte, (size-len(text))*3/4)
		is, err := f.put(t.Context(), at, r, time.Minute)
		if errors.Is(err, store.ErrRecordSize) {
			refused++
			continue
		}
		f.must("put", err)
		kept++
		at = is
		most := *r
		most.Phase, most.Outcome, most.Tries = settling, committed, mostTries
		for range r.Holds {
			most.Charged, most.Owed = append(most.Charged, store.MaxEvents), append(most.Owed, -store.MaxEvents)
		}
		is, err = f.put(t.Context(), at, &most, time.Minute)
		f.must("end", err)
		at = is
	}
	if kept == 0 || refused == 0 {
		t.Errorf("%d are kept, %d refused", kept, refused)
	}
}

// TestTakeWithoutAnIDAtTheEndOfTheConfig can be tried again.
func TestTakeWithoutAnIDAtTheEndOfTheConfig(t *testing.T) {
	f := fixture{t, provisioned(t, strings.ReplaceAll(oneZone, `"10000h"`, `"30m", "max_wait": "50m"`)), t.Name()}
	_, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(100)})
	f.must("take", err)
	f.cancel()
	if _, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(1)}); connect.CodeOf(err) != connect.CodeUnavailable {
		t.Errorf("it ends with %v", err)
	}
}

// TestUnreadRecordsAreForgotten once they are removed.
func TestUnreadRecordsAreForgotten(t *testing.T) {
	var u unread
	r, now := store.Record{Version: "1"}, time.Now()
	if u.isOld(r, now) || u.isOld(r, now.Add(store.MaxRecordLeft)) || !u.isOld(r, now.Add(store.MaxRecordLeft+1)) {
		t.Error("a record is old at another time than after an hour")
	}
	u.forget(r)
	for n := range mostUnread + 10 {
		u.isOld(store.Record{Version: strconv.Itoa(n)}, now)
	}
	if len(u.since) != mostUnread {
		t.Errorf("%d are remembered", len(u.since))
	}
	if u.isOld(store.Record{Version: "other"}, now.Add(3*store.MaxRecordLeft)); len(u.since) != 1 {
		t.Errorf("%d are remembered hours later", len(u.since))
	}
}

// TestTakeOver: a call whose maker has died is made by the next one under its ID, and the maker, if it was
// only slow, gives back what it has taken.
func TestTakeOver(t *testing.T) {
	f := newFixture(t)
	f.patience = 20 * time.Millisecond
	asked := f.reserving(30)
	slow, quick := new(limitv1.ReserveResponse), new(limitv1.ReserveResponse)
	c, err := f.newCall(t.Context(), asked.GetDomain(), asked.GetDescriptors())
	f.must("call", err)
	digest, err := c.digest("reserve", asked)
	f.must("digest", err)
	err = f.once(t.Context(), f.id(), digest, slow, func(int64) (*record, error) {
		r, err := c.hold(time.Minute, slow, func() { slow.Code = c.code() })
		f.must("hold", err)
		r.Phase, r.Outcome = open, ""
		f.wantLeft("while one is slow", 70)
		quick, err = f.reserve(t.Context(), asked)
		f.must("the other", err)
		return r, nil
	})
	if code := connect.CodeOf(err); code != connect.CodeUnavailable {
		t.Errorf("the slow one: %v", err)
	}
	if quick.GetCode() != limitv1.Code_OK {
		t.Errorf("the other: %v", quick)
	}
	f.wantLeft("in the end", 70)
	_, err = f.commit(t.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{10}})
	f.must("commit", err)
	f.wantLeft("committed", 90)
}

// TestSweepOfACallThatWasNotEnded removes its record, so that the next one under its ID need not wait.
func TestSweepOfACallThatWasNotEnded(t *testing.T) {
	f := newFixture(t)
	f.patience = 0
	_, _, err := f.begin(t.Context(), f.id(), "digest")
	f.must("begin", err)
	f.must("sweep", f.sweep(t.Context()))
	if at, r := f.there(); r != nil {
		t.Errorf("there is %+v", at)
	}
}

// TestSettlingThatWasNotEnded errs on the side of the limit: it is charged, maybe twice, and nothing is given
// back twice.
func TestSettlingThatWasNotEnded(t *testing.T) {
	for _, x := range []struct {
		phase phase
		costs int64
		left  uint64
	}{{owing, 10, 90}, {owing, 50, 50}, {settling, 10, 70}, {settling, 50, 50}, {open, 0, 100}} {
		t.Run(fmt.Sprint(x.phase, x.costs), func(t *testing.T) {
			f := newFixture(t)
			_, err := f.reserve(t.Context(), f.reserving(30))
			f.must("reserve", err)
			at, r := f.there()
			if x.phase != open {
				r = r.ended(committed, []int64{x.costs})
				r.Phase = x.phase
			}
			_, err = f.put(t.Context(), at, r, 0)
			f.must("put", err)
			f.must("sweep", f.sweep(t.Context()))
			f.wantLeft("settled", x.left)
			if _, r := f.there(); r.Phase != done {
				t.Errorf("it is %+v", r)
			}
			f.must("sweep again", f.sweep(t.Context()))
			f.wantLeft("settled once", x.left)
		})
	}
}

// unclear writes records with an unknown outcome.
type unclear struct{ store.Operable }

func (u unclear) PutRecord(ctx context.Context, r store.Record) (store.Record, error) {
	is, err := u.Operable.PutRecord(ctx, r)
	return is, cmp.Or(err, store.ErrUncertain)
}

// TestWhatHasEndedIsHeldNoMore, whoever ends it: a call, also one that does not hear whether its record was written, or
// the sweep of one that came no further.
func TestWhatHasEndedIsHeldNoMore(t *testing.T) {
	for name, costs := range map[phase]int64{open: 90, done: 90, owing: 95, settling: 95} {
		t.Run(string(name), func(t *testing.T) {
			f := newFixture(t)
			isHeld := func(want bool) {
				t.Helper()
				a, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(20)})
				f.must("take", err)
				if wait := a.GetStatuses()[0].GetRetryAfter().AsDuration(); a.GetCode() != limitv1.Code_OVER_LIMIT || (wait <= time.Second) != want {
					t.Errorf("a take is answered with %v, and something is held: %v", a, want)
				}
			}
			_, err := f.reserve(t.Context(), f.reserving(90))
			f.must("reserve", err)
			isHeld(true)
			commit := func() error {
				_, err := f.commit(t.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{uint64(costs)}})
				return err
			}
			switch name {
			case open:
				f.must("commit", commit())
			case done:
				opened := f.limiter.Store.EnterOpen()
				defer f.limiter.Store.Leave()
				kept := opened.Operable
				opened.Operable = unclear{kept}
				if err := commit(); connect.CodeOf(err) != connect.CodeUnavailable {
					t.Errorf("commit of an unknown outcome: %v", err)
				}
				opened.Operable = kept
			default:
				at, r := f.there()
				r = r.ended(committed, []int64{costs})
				r.Phase = name
				_, err = f.put(t.Context(), at, r, 0)
				f.must("put", err)
				f.must("sweep", f.sweep(t.Context()))
			}
			isHeld(false)
		})
	}
}

// unwritable are records that cannot be put.
type unwritable struct {
	store.Operable
	err error
}

func (u unwritable) PutRecord(context.Context, store.Record) (store.Record, error) {
	return store.Record{}, u.err
}

// TestReservationThatStaysOpenIsHeld: its end may have been written, unless it certainly was not.
func TestReservationThatStaysOpenIsHeld(t *testing.T) {
	for failure, want := range map[error]bool{store.ErrNotExecuted: true, store.ErrUncertain: false} {
		t.Run(failure.Error(), func(t *testing.T) {
			f := newFixture(t)
			_, err := f.reserve(t.Context(), f.reserving(90))
			f.must("reserve", err)
			opened := f.limiter.Store.EnterOpen()
			kept := opened.Operable
			opened.Operable = unwritable{kept, failure}
			if _, err := f.commit(t.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{90}}); connect.CodeOf(err) != connect.CodeUnavailable {
				t.Errorf("a commit that cannot be written: %v", err)
			}
			opened.Operable = kept
			f.limiter.Store.Leave()
			a, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(20)})
			f.must("take", err)
			if isHeld := a.GetStatuses()[0].GetRetryAfter().AsDuration() <= time.Second; isHeld != want {
				t.Errorf("it is held: %v, want %v", isHeld, want)
			}
		})
	}
}

// TestWhatIsToBeGivenBackIsHeld until it has come back, which may take a while.
func TestWhatIsToBeGivenBackIsHeld(t *testing.T) {
	f := newFixture(t)
	_, err := f.reserve(t.Context(), f.reserving(90))
	f.must("reserve", err)
	_, r := f.there()
	f.endHolds(r.ended(committed, []int64{10}))
	a, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(20)})
	f.must("take", err)
	if wait := a.GetStatuses()[0].GetRetryAfter().AsDuration(); wait == 0 || wait > time.Second {
		t.Errorf("it comes back, and a caller is told to wait %v", wait)
	}
}

// TestDebtToAStoreThatIsGone is tried again, ever more rarely, and then given up.
func TestDebtToAStoreThatIsGone(t *testing.T) {
	f := newFixture(t)
	logs := f.logs()
	_, err := f.reserve(t.Context(), f.reserving(30))
	f.must("reserve", err)
	at, r := f.there()
	r.Holds[0].Store = "gone"
	r = r.ended(released, costless(r))
	for tries := 0; tries <= mostTries; tries++ {
		if r.Phase != owing || r.Tries != tries || r.Owed[0] != -30 {
			t.Fatalf("after %d tries it is %+v", tries, r)
		}
		if longest := at.Left; tries > 0 && longest > longestPause {
			t.Fatalf("the pause is %s", longest)
		}
		at, err = f.put(t.Context(), at, r, 0)
		f.must("put", err)
		if err := f.sweep(t.Context()); err == nil {
			t.Fatal("no error")
		}
		at, r = f.there()
	}
	if r.Phase != done {
		t.Errorf("in the end it is %+v", r)
	}
	all := logs.FilterLevelExact(zap.ErrorLevel).All()
	if len(all) != 1 || all[0].ContextMap()["zone"] != "reservations" || all[0].ContextMap()["amount"] != int64(30) || !strings.Contains(all[0].Message, "was not given back") {
		t.Errorf("logged is %+v", all)
	}
}

// TestDoneRecordIsSmall: what is done is kept for long, so its size bounds how many calls there may be.
func TestDoneRecordIsSmall(t *testing.T) {
	f := newFixture(t)
	f.user = strings.Repeat("u", 36)
	_, err := f.reserve(t.Context(), f.reserving(30))
	f.must("reserve", err)
	at, _ := f.there()
	t.Logf("a reservation has %d bytes", len(at.Value))
	_, err = f.commit(t.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{10}})
	f.must("commit", err)
	// docs/service.md says at what rate that fills the room.
	const most = 525
	at, _ = f.there()
	if n := len(at.ID) + len(at.Value) + 150; n > most {
		t.Errorf("it takes %d bytes, more than %d: %s", n, most, at.Value)
	} else {
		t.Logf("it takes %d bytes: %s", n, at.Value)
	}
	a, err := f.commit(t.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{10}})
	f.must("commit again", err)
	if got := a.GetSettlements(); len(got) != 1 || got[0].GetZone() != "reservations" || got[0].GetReserved() != 30 || got[0].GetCharged() != 10 {
		t.Errorf("again it says %v", got)
	}
	if _, err = f.commit(t.Context(), &limitv1.CommitRequest{RequestId: f.user, Hits: []uint64{11}}); connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("with other hits: %v", err)
	}
}

// TestRequestIDsOfAnotherService are not this one's, because its zones are others.
func TestRequestIDsOfAnotherService(t *testing.T) {
	f := newFixture(t)
	other := provisioned(t, strings.ReplaceAll(oneZone, `"reservations"`, `"others"`))
	asked := &limitv1.TakeRequest{Domain: "a", RequestId: f.user, Descriptors: f.descriptors(5)}
	_, err := f.take(t.Context(), asked)
	f.must("take", err)
	if _, err := other.take(t.Context(), asked); connect.CodeOf(err) != connect.CodeAlreadyExists {
		t.Errorf("at the other: %v", err)
	}
}

// TestCallWithAnIDThatWaits ends with its caller or the service, and nobody finds it then.
func TestCallWithAnIDThatWaits(t *testing.T) {
	for code, end := range map[connect.Code]func(f fixture, leave context.CancelFunc){
		connect.CodeCanceled:    func(_ fixture, leave context.CancelFunc) { leave() },
		connect.CodeUnavailable: func(f fixture, _ context.CancelFunc) { f.cancel() },
	} {
		t.Run(code.String(), func(t *testing.T) {
			f := fixture{t, provisioned(t, strings.ReplaceAll(oneZone, `"10000h"`, `"30m", "max_wait": "50m"`)), t.Name()}
			_, err := f.take(t.Context(), &limitv1.TakeRequest{Domain: "a", Descriptors: f.descriptors(100)})
			f.must("take", err)
			ctx, leave := context.WithCancel(t.Context())
			defer leave()
			ended := make(chan error)
			go func() {
				_, err := f.reserve(ctx, f.reserving(1))
				ended <- err
			}()
			for r := (*record)(nil); r == nil; _, r = f.there() {
				time.Sleep(time.Millisecond) // between polls of the store
			}
			end(f, leave)
			if err := <-ended; connect.CodeOf(err) != code {
				t.Errorf("it ends with %v", err)
			}
			if at, r := f.there(); r != nil {
				t.Errorf("there is %+v", at)
			}
		})
	}
}

// TestCallerThatLeavesDuringTheTake: what was taken counts, and a caller that repeats its call finds it.
func TestCallerThatLeavesDuringTheTake(t *testing.T) {
	f := newFixture(t)
	ctx, leave := context.WithCancel(t.Context())
	leave()
	_, err := f.reserve(ctx, f.reserving(30))
	f.must("reserve", err)
	_, err = f.reserve(t.Context(), f.reserving(30))
	f.must("reserve again", err)
	f.wantLeft("once", 70)
}

// TestExpiryIsThatOfTheDecision, which may be long after the call.
func TestExpiryIsThatOfTheDecision(t *testing.T) {
	f := newFixture(t)
	var looks atomic.Int64
	began := time.Now()
	f.limiter.Now = func() time.Time { return began.Add(time.Duration(looks.Add(1)) * time.Minute) }
	a, err := f.reserve(t.Context(), f.reserving(30))
	f.must("reserve", err)
	if ends := a.GetExpiresAt().AsTime(); ends.Before(began.Add(2*time.Minute - time.Second)) {
		t.Errorf("it ends %s after the call", ends.Sub(began))
	}
}

// TestSettleTime is no shorter than what is settled may take.
func TestSettleTime(t *testing.T) {
	for charge, want := range map[string]time.Duration{"10m": 10*time.Minute + 2*time.Second, "1ms": 0, "3h": store.MaxRecordLeft - leastPatience} {
		s := provisioned(t, strings.Replace(oneZone, `{`, `{"store": {"module": "redis", "charge_timeout": "`+charge+`", "shards": [{"name": "a", "primary": "127.0.0.1:1"}]},`, 1))
		if s.settleTime < s.patience+want || s.settleTime > store.MaxRecordLeft {
			t.Errorf("with %s it is %s", charge, s.settleTime)
		}
	}
	// A call that still waits for room is not made by another one.
	if s := provisioned(t, strings.ReplaceAll(oneZone, `"10000h"`, `"30m", "max_wait": "50m"`)); s.patience <= 50*time.Minute {
		t.Errorf("a call is taken for dead after %s, and may wait for 50m", s.patience)
	}
}

// TestEndOfTheServiceAwaitsWhatIsSettled before the stores are closed.
func TestEndOfTheServiceAwaitsWhatIsSettled(t *testing.T) {
	f := newFixture(t)
	isSettled := false
	f.dealing.Go(func() {
		<-f.life.Done()
		isSettled = true
	})
	f.stop()
	if !isSettled {
		t.Error("it does not wait")
	}
}

// TestSlowSettlementHoldsUpNoOther, and a store that keeps no records is no error.
func TestSlowSettlementHoldsUpNoOther(t *testing.T) {
	f := newFixture(t)
	for range mostDealing - 1 {
		f.slots <- struct{}{}
	}
	f.patience = 0
	for _, id := range []string{f.id(), f.id() + "2"} {
		_, _, err := f.begin(t.Context(), id, "digest")
		f.must("begin", err)
	}
	f.must("sweep", f.sweep(t.Context()))
	if at, r := f.there(); r != nil {
		t.Errorf("there is %+v", at)
	}
	logs := f.logs()
	opened := f.limiter.Store.EnterOpen()
	defer f.limiter.Store.Leave()
	kept := opened.Operable
	opened.Operable = nil
	defer func() { opened.Operable = kept }()
	f.must("sweep without records", f.sweep(t.Context()))
	if logs.Len() > 0 {
		t.Errorf("logged is %v", logs.All())
	}
}

// TestDamagedRecord is an error, ends no process, and stays until it has been due for long: others may read it.
func TestDamagedRecord(t *testing.T) {
	hold := func(changes ...string) string {
		text := `{"store": "default", "limit": {"Zone": "reservations", "Window": 60000000000}, "key": "YQ==", "events": 5, "cost": 3, "taken": true, "receipt": {}}`
		for i := 0; i < len(changes); i += 2 {
			if !strings.Contains(text, changes[i]) {
				t.Fatalf("no %s in %s", changes[i], text)
			}
			text = strings.Replace(text, changes[i], changes[i+1], 1)
		}
		return text
	}
	of := func(phase string, holds ...string) string {
		return fmt.Sprintf(`{"phase": %q, "holds": [%s], "charged": [0], "owed": [-3]}`, phase, strings.Join(holds, ", "))
	}
	const window, limit = `60000000000`, `"Window": 60000000000`
	calendar := func(window, calendar string) string {
		return hold(limit, `"Align": true, "Window": `+window+`, "Calendar": `+calendar)
	}
	texts := []string{
		"x", `{"phase": "open", "holds": [{}], "owed": [1, 2]}`, `{"phase": "open", "parts": [{"hold": 3}]}`, `{"phase": "unknown"}`, `{}`,
		`{"phase": "open", "ttl": -1}`, `{"phase": "open", "ttl": 3600000000001}`, `{"phase": "owing", "tries": -1}`, `{"phase": "owing", "tries": 101}`,
		`{"phase": "open", "parts": [{"hold": -1, "hits": -1}]}`, `{"phase": "open", "parts": [{"hold": -1, "cost": -9007199254740993}]}`,
		of("owing", hold(), hold()),
		strings.Replace(of("owing", hold()), "[-3]", "[-4503599627370497]", 1), strings.Replace(of("owing", hold()), "[-3]", "[-9223372036854775808]", 1),
		strings.Replace(of("owing", hold()), "[0]", "[-1]", 1),
	}
	for _, bad := range []string{
		hold(limit, `"Window": 60000000000, "Algorithm": 5`), hold(limit, `"Window": 60000000000, "Algorithm": 255`),
		hold(window, "0"), hold(window, "-1"), hold(window, "999"), hold(window, "1001"), hold(window, "9223372036854775000"),
		hold(`"cost": 3`, `"cost": -3`), hold(`"cost": 3`, `"cost": 4503599627370497`),
		hold(`"events": 5`, `"events": 0`), hold(`"events": 5`, `"events": -5`), hold(`"events": 5`, `"events": 5, "burst": -1`),
		hold(`YQ==`, ``), hold(`YQ==`, strings.Repeat("YWFh", 30)), hold(`"receipt": {}`, `"receipt": {"Period": -1}`), hold(`"receipt": {}`, `"receipt": {"Position": -1}`),
		hold("reservations", ""),
		calendar("97200000000000", `{"Unit": "day", "TimeZone": "../../etc/passwd"}`), calendar("97200000000000", `{"Unit": "day", "TimeZone": "Europe//Berlin"}`),
		calendar("97200000000000", `{"Unit": "eon"}`), calendar("60000000000", `{"Unit": "day"}`), hold(limit, limit+`, "Calendar": {"TimeZone": "Europe/Berlin"}`),
	} {
		for _, phase := range []string{"open", "owing", "settling"} {
			texts = append(texts, of(phase, bad))
		}
	}
	for _, text := range texts {
		f := newFixture(t)
		f.user += text
		if len(f.user) > maxRequestID {
			f.user = fmt.Sprintf("%x", sha256.Sum256([]byte(text)))
		}
		f.must("put", f.records(true, func(kept store.Records) error {
			_, err := kept.PutRecord(t.Context(), store.Record{ID: f.id(), Value: text})
			return err
		}))
		if _, err := f.reserve(t.Context(), f.reserving(1)); connect.CodeOf(err) != connect.CodeUnavailable || !strings.Contains(err.Error(), "send another request_id; if all fail,") {
			t.Errorf("%s: reserve: %v", text, err)
		}
		if _, err := f.release(t.Context(), &limitv1.ReleaseRequest{RequestId: f.user}); connect.CodeOf(err) != connect.CodeUnavailable {
			t.Errorf("%s: release: %v", text, err)
		}
		if err := f.sweep(t.Context()); err == nil {
			t.Errorf("%s: the sweep has no error", text)
		}
		var at store.Record
		f.must("read", f.records(true, func(kept store.Records) (err error) {
			at, err = kept.Record(t.Context(), f.id())
			return err
		}))
		if at.Value != text {
			t.Errorf("%s: it is %q", text, at.Value)
		}
		now := f.limiter.Now().Add(store.MaxRecordLeft + time.Second)
		f.limiter.Now = func() time.Time { return now }
		if err := f.dealWith(t.Context(), at); !errors.Is(err, store.ErrDamaged) {
			t.Errorf("%s: dealing with it: %v", text, err)
		}
		_, err := f.reserve(t.Context(), f.reserving(1))
		f.must("reserve", err)
	}
}

// TestValidRecordIsRead, with all that holds may have.
func TestValidRecordIsRead(t *testing.T) {
	for _, text := range []string{
		`{"phase": "taking"}`,
		`{"phase": "owing", "owed": [-3], "charged": [0], "tries": 100, "holds": [{"store": "default", "limit": {"Zone": "z", "Algorithm": 3, "Window": 1000000}, "key": "YQ==", "events": 5, "burst": 9, "cost": 3, "receipt": {"Period": 9007199254740991}}]}`,
		`{"phase": "open", "holds": [{"store": "default", "limit": {"Zone": "z", "Align": true, "Window": 97200000000000, "Calendar": {"Unit": "day", "TimeZone": "Europe/Berlin"}}, "key": "YQ==", "events": 5, "cost": 3, "receipt": {}}]}`,
	} {
		if _, err := read(store.Record{Value: text}); err != nil {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// TestPanicOfARecord is an error. A charge is tried again, and what may have been given back is not.
func TestPanicOfARecord(t *testing.T) {
	f := newFixture(t)
	_, err := f.reserve(t.Context(), f.reserving(30))
	f.must("reserve", err)
	_, r := f.there()
	r.Holds[0].Limit.Algorithm = store.Algorithms
	for _, owed := range []int64{5, -5} {
		r.Owed = []int64{owed}
		left, err := f.carryOut(r)
		if err == nil || left[0] != max(owed, 0) {
			t.Errorf("%d: %v, %v", owed, left, err)
		}
	}
}
