package service_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	grpcstatus "google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/shardlimit/caddy-shardlimit/internal/caddytest"
	"github.com/shardlimit/caddy-shardlimit/service/limitv1"
)

const limitService = "/shardlimit.limit.v1.LimitService/"

// limits calls the LimitService of a Caddy by gRPC.
type limits struct {
	t    *testing.T
	conn *grpc.ClientConn
}

func dialLimits(t *testing.T, c *caddytest.Caddy) limits {
	t.Helper()
	conn, err := grpc.NewClient(c.Addr, grpc.WithTransportCredentials(insecure.NewCredentials()))
	caddytest.Must(t, "dial", err)
	t.Cleanup(func() { conn.Close() })
	return limits{t, conn}
}

// tokensOf is the descriptor of a user of a kind, with hits.
func tokensOf(kind, user string, hits uint64) []*limitv1.Descriptor {
	return []*limitv1.Descriptor{{Entries: []*limitv1.Entry{{Key: kind, Value: user}}, Hits: &hits}}
}

func (l limits) take(id, kind, user string, hits uint64) (*limitv1.TakeResponse, error) {
	answer := new(limitv1.TakeResponse)
	err := l.conn.Invoke(l.t.Context(), limitService+"Take", &limitv1.TakeRequest{Domain: "llm", RequestId: id, Descriptors: tokensOf(kind, user, hits)}, answer)
	return answer, err
}

func (l limits) reserve(id, kind, user string, hits uint64, ttl time.Duration) (*limitv1.ReserveResponse, error) {
	answer := new(limitv1.ReserveResponse)
	err := l.conn.Invoke(l.t.Context(), limitService+"Reserve", &limitv1.ReserveRequest{
		Domain: "llm", RequestId: id, Descriptors: tokensOf(kind, user, hits), Ttl: durationpb.New(ttl),
	}, answer)
	return answer, err
}

func (l limits) commit(id string, hits ...uint64) (*limitv1.CommitResponse, error) {
	answer := new(limitv1.CommitResponse)
	err := l.conn.Invoke(l.t.Context(), limitService+"Commit", &limitv1.CommitRequest{RequestId: id, Hits: hits}, answer)
	return answer, err
}

func (l limits) release(id string) (*limitv1.ReleaseResponse, error) {
	answer := new(limitv1.ReleaseResponse)
	err := l.conn.Invoke(l.t.Context(), limitService+"Release", &limitv1.ReleaseRequest{RequestId: id}, answer)
	return answer, err
}

// saysOf returns the code of an answer and, in brackets, those of its descriptors and what is left, or the
// code of an error.
func saysOf(a interface {
	GetCode() limitv1.Code
	GetStatuses() []*limitv1.Status
}, err error) string {
	if err != nil {
		return grpcstatus.Code(err).String()
	}
	var all []string
	for _, s := range a.GetStatuses() {
		text := s.GetCode().String()
		if s.GetLimit() > 0 {
			text += fmt.Sprintf(" %s %d/%d", s.GetZone(), s.GetRemaining(), s.GetLimit())
		}
		if s.GetCode() == limitv1.Code_OK && s.GetRetryAfter() != nil {
			text += " again after " + s.GetRetryAfter().AsDuration().String()
		}
		all = append(all, text)
	}
	return a.GetCode().String() + " [" + strings.Join(all, ", ") + "]"
}

// settledOf returns what has been charged of what was reserved, or the code of an error.
func settledOf(a interface {
	GetSettlements() []*limitv1.Settlement
}, err error) string {
	if err != nil {
		return grpcstatus.Code(err).String()
	}
	var all []string
	for _, s := range a.GetSettlements() {
		all = append(all, fmt.Sprintf("%s %d/%d", s.GetZone(), s.GetCharged(), s.GetReserved()))
	}
	return strings.Join(all, ", ")
}

// left returns what is left, in the words of the status.
func (l limits) left(kind, user string) string { return saysOf(l.take("", kind, user, 0)) }

// awaitLeft waits until so much is left.
func (l limits) awaitLeft(kind, user, want string) {
	l.t.Helper()
	caddytest.Eventually(l.t, "it counts", func() error {
		return caddytest.Want(kind+" of "+user, l.left(kind, user), want)
	})
}

func expect(t *testing.T, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: %s, want %s", what, got, want)
	}
}

// llm has a zone for each algorithm, named as the key of its descriptor.
const llm = `
	domain llm {
		descriptor fixed zone fixed
		descriptor sliding zone sliding
		descriptor log zone log
		descriptor gcra zone gcra
		descriptor triple zone triple
		descriptor used zone fixed always
		descriptor free unlimited
		descriptor banned denied
		descriptor watched zone watched
		descriptor batched zone batched
	}
	zone fixed {
		events 100
		window 10000h
	}
	zone sliding {
		events 100
		window 10000h
		algorithm sliding_window
	}
	zone log {
		events 100
		window 10000h
		algorithm sliding_log
	}
	zone gcra {
		events 100
		window 100000h
		algorithm gcra
	}
	zone batched {
		events 100
		window 10000h
		batch 50
	}
	zone triple {
		events 100
		window 10000h
		cost 3
	}
	zone watched {
		events 10
		window 10000h
		enforce 0
	}
`

// TestReservations are committed with what they cost, or released, whatever the algorithm.
func TestReservations(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store(), "secret": servers.Store("key_secret 0123456789abcdef0123456789abcdef")} {
		t.Run(name, func(t *testing.T) {
			l := dialLimits(t, caddytest.Start(t, site(store, llm)))
			for _, kind := range []string{"fixed", "sliding", "log", "gcra"} {
				zone := func(format string, args ...any) string {
					return strings.ReplaceAll(fmt.Sprintf(format, args...), "zone", kind)
				}
				id := func(name string) string { return kind + " " + name }
				expect(t, "reserve", saysOf(l.reserve(id("a"), kind, "u", 60, time.Hour)), zone("OK [OK zone 40/100]"))
				expect(t, "reserve again", saysOf(l.reserve(id("a"), kind, "u", 60, time.Hour)), zone("OK [OK zone 40/100]"))
				expect(t, "what does not fit", saysOf(l.reserve(id("b"), kind, "u", 50, time.Hour)), zone("OVER_LIMIT [OVER_LIMIT zone 40/100]"))
				expect(t, "commit what was refused", settledOf(l.commit(id("b"))), "NotFound")
				expect(t, "commit less", settledOf(l.commit(id("a"), 20)), zone("zone 20/60"))
				l.awaitLeft(kind, "u", zone("OK [OK zone 80/100]"))
				expect(t, "commit again", settledOf(l.commit(id("a"), 20)), zone("zone 20/60"))
				expect(t, "commit otherwise", settledOf(l.commit(id("a"), 30)), "AlreadyExists")
				expect(t, "release what was committed", settledOf(l.release(id("a"))), "FailedPrecondition")
				expect(t, "reserve under the ID", saysOf(l.reserve(id("a"), kind, "u", 60, time.Hour)), zone("OK [OK zone 40/100]"))
				expect(t, "once more what did not fit", saysOf(l.reserve(id("b"), kind, "u", 50, time.Hour)), zone("OK [OK zone 30/100]"))
				expect(t, "release", settledOf(l.release(id("b"))), zone("zone 0/50"))
				l.awaitLeft(kind, "u", zone("OK [OK zone 80/100]"))
				expect(t, "release again", settledOf(l.release(id("b"))), zone("zone 0/50"))
				expect(t, "commit what was released", settledOf(l.commit(id("b"), 50)), "FailedPrecondition")
				expect(t, "equal", saysOf(l.reserve(id("c"), kind, "u", 10, time.Hour)), zone("OK [OK zone 70/100]"))
				expect(t, "commit the estimate", settledOf(l.commit(id("c"))), zone("zone 10/10"))
				expect(t, "commit it again", settledOf(l.commit(id("c"), 10)), zone("zone 10/10"))
				l.awaitLeft(kind, "u", zone("OK [OK zone 70/100]"))
				expect(t, "no estimate", saysOf(l.reserve(id("d"), kind, "u", 0, time.Hour)), zone("OK [OK zone 70/100]"))
				expect(t, "a low estimate", saysOf(l.reserve(id("e"), kind, "u", 5, time.Hour)), zone("OK [OK zone 65/100]"))
				expect(t, "commit more", settledOf(l.commit(id("e"), 8)), zone("zone 8/5"))
				l.awaitLeft(kind, "u", zone("OK [OK zone 62/100]"))
				expect(t, "commit more than is left", settledOf(l.commit(id("d"), 90)), zone("zone 90/0"))
				l.awaitLeft(kind, "u", zone("OVER_LIMIT [OVER_LIMIT zone 0/100]"))
			}
			expect(t, "a cost of three", saysOf(l.reserve("t", "triple", "u", 10, time.Hour)), "OK [OK triple 70/100]")
			expect(t, "commit that", settledOf(l.commit("t", 2)), "triple 6/30")
			expect(t, "no batch", saysOf(l.reserve("b", "batched", "u", 60, time.Hour)), "OK [OK batched 40/100]")
			expect(t, "commit that", settledOf(l.commit("b", 10)), "batched 10/60")
			expect(t, "what is left", saysOf(l.reserve("c", "batched", "u", 90, time.Hour)), "OK [OK batched 0/100]")
			expect(t, "unlimited", saysOf(l.reserve("f", "free", "u", 10, time.Hour)), "OK [OK]")
			expect(t, "commit that", settledOf(l.commit("f", 2)), "NotFound")
			expect(t, "denied", saysOf(l.reserve("g", "banned", "u", 10, time.Hour)), "OVER_LIMIT [OVER_LIMIT]")
			expect(t, "observed", saysOf(l.reserve("w1", "watched", "u", 8, time.Hour)), "OK [OK watched 2/10]")
			expect(t, "observed without room", saysOf(l.reserve("w2", "watched", "u", 8, time.Hour)), "OK [OK watched 2/10]")
			expect(t, "which counts nothing", settledOf(l.commit("w2", 9)), "")
			expect(t, "a report", saysOf(l.reserve("r", "used", "u", 10, time.Hour)), "InvalidArgument")
		})
	}
}

// TestDescriptorsOfAReservation are committed one by one, and those of one bucket together.
func TestDescriptorsOfAReservation(t *testing.T) {
	t.Parallel()
	l := dialLimits(t, caddytest.Start(t, site("", llm)))
	asked := &limitv1.ReserveRequest{Domain: "llm", RequestId: "r"}
	for _, d := range [][]*limitv1.Descriptor{tokensOf("fixed", "a", 10), tokensOf("free", "a", 1), tokensOf("log", "a", 20), tokensOf("fixed", "a", 5)} {
		asked.Descriptors = append(asked.Descriptors, d...)
	}
	answer := new(limitv1.ReserveResponse)
	caddytest.Must(t, "reserve", l.conn.Invoke(t.Context(), limitService+"Reserve", asked, answer))
	expect(t, "reserve", saysOf(answer, nil), "OK [OK fixed 85/100, OK, OK log 80/100, OK fixed 85/100]")
	ends := time.Until(answer.GetExpiresAt().AsTime())
	caddytest.Must(t, "the default is a minute", caddytest.Want("having that", ends > 0 && ends <= time.Minute, true))
	expect(t, "two numbers", settledOf(l.commit("r", 1, 2)), "InvalidArgument")
	expect(t, "each", settledOf(l.commit("r", 1, 2, 3, 4)), "fixed 5/15, log 3/20")
	expect(t, "left of one", l.left("fixed", "a"), "OK [OK fixed 95/100]")
	expect(t, "left of the other", l.left("log", "a"), "OK [OK log 97/100]")
	asked.RequestId = "all"
	caddytest.Must(t, "reserve", l.conn.Invoke(t.Context(), limitService+"Reserve", asked, answer))
	expect(t, "one number for all", settledOf(l.commit("all", 7)), "fixed 14/15, log 7/20")
}

// TestRequestIDsCountOnce: of calls under one ID, at the same time and over two Caddys, one counts, and all
// have its answer.
func TestRequestIDsCountOnce(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	services := make([]limits, 2)
	for i, c := range caddytest.StartMany(t, 2, site(servers.Store(), llm)) {
		services[i] = dialLimits(t, c)
	}
	const calls, ids = 10, 2
	for id := range ids {
		user := fmt.Sprint("user", id)
		caddytest.Together(t, calls, func(i int) error {
			l := services[i%2]
			return errors.Join(
				caddytest.Want("take", saysOf(l.take(fmt.Sprint("take", id), "fixed", user, 7)), "OK [OK fixed 93/100]"),
				caddytest.Want("reserve", saysOf(l.reserve(fmt.Sprint("reserve", id), "log", user, 9, time.Hour)), "OK [OK log 91/100]"),
			)
		})
		expect(t, "taken", services[0].left("fixed", user), "OK [OK fixed 93/100]")
		expect(t, "reserved", services[1].left("log", user), "OK [OK log 91/100]")
		caddytest.Together(t, calls, func(i int) error {
			return caddytest.Want("commit", settledOf(services[i%2].commit(fmt.Sprint("reserve", id), 4)), "log 4/9")
		})
		for _, l := range services {
			l.awaitLeft("log", user, "OK [OK log 96/100]")
		}
	}
}

// TestReservationsExpire, also after a reload, and where the Caddy that made them has died.
func TestReservationsExpire(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := caddytest.Start(t, site(store, llm))
			l := dialLimits(t, c)
			other := l
			if store != "" {
				other = dialLimits(t, caddytest.Start(t, site(store, llm)))
			}
			for i := range 3 {
				user := fmt.Sprint(name, i)
				expect(t, "reserve", saysOf(l.reserve(user, "fixed", user, 60, time.Second)), "OK [OK fixed 40/100]")
			}
			if store != "" {
				c.Kill()
			} else {
				c.MustLoad(site(store, llm+"\njitter 0.1"))
			}
			for i := range 3 {
				user := fmt.Sprint(name, i)
				other.awaitLeft("fixed", user, "OK [OK fixed 100/100]")
				expect(t, "commit what has expired", settledOf(other.commit(user, 80)), "fixed 80/60")
				expect(t, "commit it again", settledOf(other.commit(user, 80)), "fixed 80/60")
				expect(t, "commit it otherwise", settledOf(other.commit(user, 1)), "AlreadyExists")
				expect(t, "release it", settledOf(other.release(user)), "FailedPrecondition")
				expect(t, "what is left", other.left("fixed", user), "OK [OK fixed 20/100]")
			}
		})
	}
}

// TestReservationsOverSeveralServices: two Caddys on two shards, one of which is killed and comes back:
// what was committed, is open or was lost with a reply never exceeds the limit, and what has ended is given
// back.
func TestReservationsOverSeveralServices(t *testing.T) {
	t.Parallel()
	const limit, users, workers, rounds, estimate, used = 400, 4, 4, 12, 50, 20
	servers := caddytest.StartLastingShards(t, 2, 0)
	block := fmt.Sprintf("domain llm {\ndescriptor user zone users\n}\nzone users {\nevents %d\nwindow 10000h\non_error deny\n}", limit)
	services := make([]limits, 2)
	for i, c := range caddytest.StartMany(t, len(services), site(servers.Store("check_timeout 2s", "charge_timeout 2s"), block)) {
		services[i] = dialLimits(t, c)
	}
	userOf := func(i int) string { return fmt.Sprint("u", i%users) }
	var sure, unsure [users]atomic.Int64
	// until repeats a call at any Caddy until there is an answer. Each that had none may have left the estimate
	// charged.
	until := func(i, user int, call func(l limits) error) error {
		for deadline := time.Now().Add(caddytest.Patience); ; i++ {
			err := call(services[i%len(services)])
			if code := grpcstatus.Code(err); code != codes.Unavailable && code != codes.DeadlineExceeded || time.Now().After(deadline) {
				return err
			}
			unsure[user].Add(estimate)
			time.Sleep(20 * time.Millisecond) // a client that comes again does not do so at once
		}
	}
	// traffic makes each worker wait for half in the middle.
	traffic := func(phase string, half <-chan struct{}) {
		caddytest.Together(t, workers, func(worker int) error {
			for n := range rounds {
				if n == rounds/2 {
					<-half
				}
				i := worker + n
				id, user := fmt.Sprint(phase, worker, ".", n), i%users
				var reserved *limitv1.ReserveResponse
				if err := until(i, user, func(l limits) (err error) {
					reserved, err = l.reserve(id, "user", userOf(user), estimate, time.Hour)
					return err
				}); err != nil {
					return fmt.Errorf("reserve %s: %w", id, err)
				}
				if reserved.GetCode() != limitv1.Code_OK {
					continue
				}
				if err := until(i+1, user, func(l limits) error {
					_, err := l.commit(id, used)
					return err
				}); err != nil {
					return fmt.Errorf("commit %s: %w", id, err)
				}
				if n := sure[user].Add(used); n > limit {
					return fmt.Errorf("user %d has committed %d", user, n)
				}
			}
			return nil
		})
	}
	// spent requires that so much is spent in the end, or up to that much more.
	spent := func(what string, more func(user int) int64) {
		t.Helper()
		for user := range users {
			caddytest.Eventually(t, what, func() error {
				a, err := services[user%len(services)].take("", "user", userOf(user), 0)
				if err != nil {
					return err
				}
				n, least := limit-int64(a.GetStatuses()[0].GetRemaining()), sure[user].Load()
				if n < least || n > least+more(user) {
					return fmt.Errorf("user %d: %d is spent, committed was %d, and %d may be", user, n, least, more(user))
				}
				t.Logf("%s: user %d has spent %d, committed was %d", what, user, n, least)
				return nil
			})
		}
	}
	// What each worker was giving back when a call had no answer may stay charged.
	lost := func(user int) int64 {
		if n := unsure[user].Load(); n > 0 {
			return n + workers*estimate
		}
		return 0
	}
	now := make(chan struct{})
	close(now)
	traffic("before", now)
	spent("exactly what was committed, or lost with a reply", lost)
	sum := func(of *[users]atomic.Int64) (n int64) {
		for user := range users {
			n += of[user].Load()
		}
		return n
	}
	// await waits until there is more; it runs beside the test.
	await := func(of *[users]atomic.Int64, more int64) {
		for deadline := time.Now().Add(caddytest.Patience); sum(of) <= more && time.Now().Before(deadline); {
			time.Sleep(time.Millisecond) // polls
		}
	}
	killed, restarted, was := make(chan struct{}), make(chan error, 1), sum(&unsure)
	go func(before int64) {
		await(&sure, before+5*used)
		err := servers[0].Primary.Kill()
		close(killed)
		await(&unsure, was)
		restarted <- errors.Join(err, servers[0].Primary.Restart())
	}(sum(&sure))
	traffic("while", killed)
	caddytest.Must(t, "restart", <-restarted)
	if sum(&unsure) == was {
		t.Error("no call has met the outage")
	}
	spent("what was committed, or lost with a reply", func(user int) int64 { return max(lost(user), workers*estimate) })
}

// TestReservationsWithoutTheirStore are errors, whatever on_error says, and nothing passes unrecorded.
func TestReservationsWithoutTheirStore(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	block := "domain llm {\n"
	zones := ""
	for _, mode := range []string{"deny", "allow", "local"} {
		block += "descriptor " + mode + " zone " + mode + "\n"
		zones += "zone " + mode + " {\nevents 10\nwindow 1h\non_error " + mode + "\n}\n"
	}
	l := dialLimits(t, caddytest.Start(t, site(servers.Store("check_timeout 200ms", "charge_timeout 200ms"), block+"}\n"+zones)))
	servers.Kill(t)
	for _, mode := range []string{"deny", "allow", "local"} {
		expect(t, "reserve with "+mode, saysOf(l.reserve("a", mode, "u", 1, time.Hour)), "Unavailable")
		expect(t, "take under an ID with "+mode, saysOf(l.take("b", mode, "u", 1)), "Unavailable")
	}
	expect(t, "commit", settledOf(l.commit("a")), "Unavailable")
	expect(t, "take with deny", saysOf(l.take("", "deny", "u", 1)), "Unavailable")
	expect(t, "take with allow", saysOf(l.take("", "allow", "u", 1)), "OK [OK]")
	expect(t, "take with local", saysOf(l.take("", "local", "u", 1)), "OK [OK local 9/10]")
}

// TestReservationThatOnErrorLetPass is charged once its shard is back, with what is committed more, and nothing
// of it is given back.
func TestReservationThatOnErrorLetPass(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartLastingShards(t, 2, 0)
	l := dialLimits(t, caddytest.Start(t, site(servers.Store("charge_timeout 200ms"),
		"domain llm {\ndescriptor user zone users\n}\nzone users {\nevents 100\nwindow 10000h\non_error allow\n}")))
	expect(t, "first", saysOf(l.take("", "user", "u", 1)), "OK [OK users 99/100]")
	for i := range servers {
		if len(servers[i:i+1].Buckets(t, "users")) > 0 {
			servers[i : i+1].Kill(t)
			servers = servers[i : i+1]
			break
		}
	}
	// Some records are kept by the other shard.
	reserve := func(name string, hits uint64) (id string) {
		for i := 0; ; i++ {
			id = fmt.Sprint(name, i)
			if got := saysOf(l.reserve(id, "user", "u", hits, time.Hour)); got != "Unavailable" || i > 100 {
				expect(t, "reserve "+name, got, "OK [OK]")
				return id
			}
		}
	}
	expect(t, "commit more", settledOf(l.commit(reserve("more", 10), 15)), "users 15/10")
	expect(t, "commit less", settledOf(l.commit(reserve("less", 20), 5)), "users 20/20")
	expect(t, "release", settledOf(l.release(reserve("none", 30))), "users 30/30")
	servers.Restart(t)
	l.awaitLeft("user", "u", "OK [OK users 34/100]")
}

// TestReservationAtTwoShards of a client that moves: what one of them cannot take back it takes back later, and
// nothing twice.
func TestReservationAtTwoShards(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 2, 0)
	l := dialLimits(t, caddytest.Start(t, site(
		caddytest.RedisStore(caddytest.ShardOf("a", servers[0], "weight 0 was 1"), caddytest.ShardOf("b", servers[1], "weight 1 was 0"), "charge_timeout 200ms"),
		"domain llm {\ndescriptor user zone users\n}\nzone users {\nevents 100\nwindow 10000h\n}")))
	expect(t, "reserve", saysOf(l.reserve("a", "user", "u", 50, time.Hour)), "OK [OK users 50/100]")
	memory := func(limit string) {
		caddytest.Must(t, "limit the memory", servers[1].Primary.Client().ConfigSet(t.Context(), "maxmemory", limit).Err())
	}
	memory("1")
	_, err := l.commit("a", 20)
	t.Logf("while one shard is full: %v", err)
	counts := func(i int, want int64) {
		t.Helper()
		caddytest.Eventually(t, "it is given back", func() error {
			sum := int64(0)
			for _, b := range servers[i:i+1].Buckets(t, "users") {
				sum += b.Count
			}
			return caddytest.Want(fmt.Sprint("count at shard ", i), sum, want)
		})
	}
	counts(0, 20)
	counts(1, 50)
	memory("0")
	counts(1, 20)
	counts(0, 20)
	l.awaitLeft("user", "u", "OK [OK users 80/100]")
}

// TestLateCommitAfterAReload charges what was reserved where, whatever has become of the zone.
func TestLateCommitAfterAReload(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	for name, store := range map[string]string{"memory": "", "redis": servers.Store()} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := caddytest.Start(t, site(store, llm))
			l := dialLimits(t, c)
			expect(t, "reserve", saysOf(l.reserve(name, "fixed", name, 60, time.Second)), "OK [OK fixed 40/100]")
			l.awaitLeft("fixed", name, "OK [OK fixed 100/100]")
			c.MustLoad(site(store, "domain llm {\ndescriptor other zone other\n}\nzone other {\nevents 1\nwindow 1m\n}"))
			expect(t, "commit", settledOf(l.commit(name, 80)), "fixed 80/60")
			c.MustLoad(site(store, llm))
			expect(t, "what is left", l.left("fixed", name), "OK [OK fixed 20/100]")
		})
	}
}

// TestErrorsOfLimits: hostile and wrong calls are errors, and the service goes on.
func TestErrorsOfLimits(t *testing.T) {
	t.Parallel()
	l := dialLimits(t, caddytest.Start(t, site("", llm)))
	call := func(name string, asked proto.Message) error {
		answer := new(limitv1.ReserveResponse)
		return l.conn.Invoke(t.Context(), limitService+name, asked, answer)
	}
	reserve := func(change func(r *limitv1.ReserveRequest)) error {
		r := &limitv1.ReserveRequest{Domain: "llm", RequestId: "x", Descriptors: tokensOf("fixed", "u", 1)}
		change(r)
		return call("Reserve", r)
	}
	id := func(id string) error { return reserve(func(r *limitv1.ReserveRequest) { r.RequestId = id }) }
	ttl := func(d time.Duration) error {
		return reserve(func(r *limitv1.ReserveRequest) { r.Ttl = durationpb.New(d) })
	}
	descriptors := func(all ...*limitv1.Descriptor) error {
		return reserve(func(r *limitv1.ReserveRequest) { r.Descriptors = all })
	}
	var many []*limitv1.Descriptor
	for range 101 {
		many = append(many, tokensOf("fixed", "u", 1)...)
	}
	var wide []*limitv1.Descriptor
	for i := range 100 {
		wide = append(wide, tokensOf("log", fmt.Sprint(strings.Repeat("w", 60), i), 1)...)
	}
	expect(t, "a Take", saysOf(l.take("taken", "fixed", "u", 1)), "OK [OK fixed 99/100]")
	expect(t, "a reservation", saysOf(l.reserve("open", "fixed", "u", 1, time.Hour)), "OK [OK fixed 98/100]")
	must := func(_ any, err error) error { return err }
	for what, x := range map[string]struct {
		err  error
		code codes.Code
		says string
	}{
		"no ID":             {id(""), codes.InvalidArgument, "request_id is empty"},
		"a long ID":         {id(strings.Repeat("é", 65)), codes.InvalidArgument, "request_id has 130 bytes"},
		"a line in an ID":   {id("a\nb"), codes.InvalidArgument, "request_id has control characters"},
		"C1 in an ID":       {id("a\u0085b"), codes.InvalidArgument, "request_id has control characters"},
		"a used ID":         {id("open"), codes.AlreadyExists, "request_id was used for something else"},
		"the ID of a Take":  {id("taken"), codes.AlreadyExists, "request_id was used for something else"},
		"short":             {ttl(time.Second - 1), codes.InvalidArgument, "ttl is 999.999999ms"},
		"long":              {ttl(time.Hour + 1), codes.InvalidArgument, "ttl is 1h0m0.000000001s"},
		"negative":          {ttl(-time.Hour), codes.InvalidArgument, "ttl is -1h0m0s"},
		"endless":           {reserve(func(r *limitv1.ReserveRequest) { r.Ttl = &durationpb.Duration{Seconds: 1 << 62, Nanos: -5} }), codes.InvalidArgument, "ttl is"},
		"no domain":         {reserve(func(r *limitv1.ReserveRequest) { r.Domain = "" }), codes.InvalidArgument, "domain is empty"},
		"unknown domain":    {reserve(func(r *limitv1.ReserveRequest) { r.Domain = "x" }), codes.InvalidArgument, `domain "x" is unknown`},
		"no descriptors":    {descriptors(), codes.InvalidArgument, "descriptors is empty"},
		"101 descriptors":   {descriptors(many...), codes.InvalidArgument, "at most 100"},
		"no entries":        {descriptors(new(limitv1.Descriptor)), codes.InvalidArgument, "descriptors[0] has no entries"},
		"an empty key":      {descriptors(tokensOf("", "u", 1)...), codes.InvalidArgument, "descriptors[0].entries[0] has an empty key"},
		"too many hits":     {descriptors(tokensOf("fixed", "u", 1<<53)...), codes.InvalidArgument, "descriptors[0].hits is 9007199254740992"},
		"100 clients":       {descriptors(wide...), codes.ResourceExhausted, "send fewer descriptors"},
		"a long message":    {descriptors(tokensOf("fixed", strings.Repeat("u", 1<<17), 1)...), codes.ResourceExhausted, "larger than configured max"},
		"commit nothing":    {must(l.commit("nothing")), codes.NotFound, "no reservation has this request_id"},
		"release nothing":   {must(l.release("nothing")), codes.NotFound, "no reservation has this request_id"},
		"commit a Take":     {must(l.commit("taken")), codes.FailedPrecondition, "that of a Take"},
		"commit without ID": {must(l.commit("")), codes.InvalidArgument, "request_id is empty"},
		"release with NUL":  {must(l.release("\x00")), codes.InvalidArgument, "control characters"},
		"commit two hits":   {must(l.commit("open", 1, 2)), codes.InvalidArgument, "hits has 2 numbers, and the reservation 1 descriptors"},
		"commit many hits":  {must(l.commit("open", 1<<53)), codes.InvalidArgument, "hits[0] is"},
	} {
		if got := grpcstatus.Convert(x.err); got.Code() != x.code || !strings.Contains(got.Message(), x.says) {
			t.Errorf("%s: %v, want %v: %s", what, x.err, x.code, x.says)
		}
	}
	expect(t, "the 100 clients were given back", l.left("log", strings.Repeat("w", 60)+"7"), "OK [OK log 100/100]")
	expect(t, "commit", settledOf(l.commit("open", 1<<52)), "fixed 4503599627370496/1")
}

// TestLimitsByJSON: the calls are plain POSTs.
func TestLimitsByJSON(t *testing.T) {
	t.Parallel()
	c := caddytest.Start(t, site("", llm))
	call := func(name, body string) string {
		t.Helper()
		resp, err := c.Client.Post(c.URL+limitService+name, "application/json", strings.NewReader(body))
		caddytest.Must(t, "post", err)
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		caddytest.Must(t, "read", err)
		var answer map[string]any
		caddytest.Must(t, string(text), json.Unmarshal(text, &answer))
		if resp.StatusCode != http.StatusOK {
			return fmt.Sprint(resp.StatusCode, " ", answer["code"])
		}
		if all, _ := answer["statuses"].([]any); len(all) > 0 {
			st := all[0].(map[string]any)
			return fmt.Sprint(answer["code"], " ", st["zone"], " ", st["remaining"], " ", st["retryAfter"] != nil, " ", answer["expiresAt"] != nil)
		}
		return fmt.Sprint(answer["settlements"])
	}
	const who = `"domain": "llm", "descriptors": [{"entries": [{"key": "fixed", "value": "acme"}], "hits": `
	expect(t, "take", call("Take", `{`+who+`30}]}`), "OK fixed 70 false false")
	expect(t, "take under an ID", call("Take", `{`+who+`30}], "requestId": "t"}`), "OK fixed 40 false false")
	expect(t, "take again", call("Take", `{`+who+`"30"}], "request_id": "t"}`), "OK fixed 40 false false")
	expect(t, "reserve", call("Reserve", `{`+who+`20}], "requestId": "r", "ttl": "60s"}`), "OK fixed 20 false true")
	expect(t, "refused", call("Reserve", `{`+who+`30}], "requestId": "s"}`), "OVER_LIMIT fixed 20 true false")
	expect(t, "commit", call("Commit", `{"requestId": "r", "hits": [5]}`), "[map[charged:5 reserved:20 zone:fixed]]")
	expect(t, "reserve", call("Reserve", `{`+who+`20}], "requestId": "q"}`), "OK fixed 15 false true")
	expect(t, "release", call("Release", `{"requestId": "q"}`), "[map[reserved:20 zone:fixed]]")
	expect(t, "unknown", call("Release", `{"requestId": "z"}`), "404 not_found")
	expect(t, "no JSON", call("Commit", `{`), "400 invalid_argument")
}

// TestCallerOfAReservationThatLeaves finds the answer when it comes back.
func TestCallerOfAReservationThatLeaves(t *testing.T) {
	t.Parallel()
	servers := caddytest.StartShards(t, 1, 0)
	l := dialLimits(t, caddytest.Start(t, site(servers.Store(), llm)))
	expect(t, "first", saysOf(l.take("", "fixed", "u", 1)), "OK [OK fixed 99/100]")
	caddytest.Must(t, "pause", servers[0].Primary.Pause())
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	err := l.conn.Invoke(ctx, limitService+"Reserve", &limitv1.ReserveRequest{
		Domain: "llm", RequestId: "r", Descriptors: tokensOf("fixed", "u", 9), Ttl: durationpb.New(time.Hour),
	}, new(limitv1.ReserveResponse))
	caddytest.Must(t, "resume", servers[0].Primary.Resume())
	caddytest.Must(t, fmt.Sprint(err), caddytest.Want("code", grpcstatus.Code(err), codes.DeadlineExceeded))
	expect(t, "again", saysOf(l.reserve("r", "fixed", "u", 9, time.Hour)), "OK [OK fixed 90/100]")
	expect(t, "what is left", l.left("fixed", "u"), "OK [OK fixed 90/100]")
}
