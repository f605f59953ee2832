package redis

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/internal/storetest"
	"github.com/shardlimit/caddy-shardlimit/internal/sweep"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/algorithm"
)

// TestDocumentedACLSuffices gives a user the documented rule and no other.
func TestDocumentedACLSuffices(t *testing.T) {
	sh := redistest.StartShard(t, 1)
	for _, server := range append(sh.Replicas, sh.Primary) {
		undone(t, server)
		args := []any{"ACL", "SETUSER", "limiter", "reset", "on", ">secret"}
		for _, word := range documentedRule(t) {
			args = append(args, word)
		}
		must(t, server.Client().Do(t.Context(), args...).Err())
	}
	s := newStore(t, newShard(t, ShardOptions{
		Primary: sh.Primary.Addr(), Replicas: []string{sh.Replicas[0].Addr()},
		Credentials: login("limiter", "secret"),
	}), nil)
	s.Warm(t.Context())
	for i := range 10 {
		used(t, fmt.Sprint("charge ", i), store.Answers(t.Context(), s.Charge, oneOf("k"))[0], int64(i+1))
		if st := store.Answers(t.Context(), s.Check, oneOf("k"))[0]; st.Err != nil {
			t.Fatalf("check %d: %v", i, st.Err)
		}
	}
	if st := store.Answers(t.Context(), s.Check, oneOf("other"))[0]; st.Err != nil {
		t.Fatalf("opening a window: %v", st.Err)
	}
}

func TestDatabase(t *testing.T) {
	server := redistest.Start(t)
	s := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), DB: 3}), nil)
	must(t, store.Answers(t.Context(), s.Charge, oneOf("k"))[0].Err)
	info, err := server.Info("keyspace")
	must(t, err)
	if !strings.HasPrefix(info["db3"], "keys=1,") || info["db0"] != "" {
		t.Errorf("keys are in %v", info)
	}
}

// documentedRule returns the words of the documented ACL rule after the password.
func documentedRule(t *testing.T) []string {
	t.Helper()
	text, err := os.ReadFile("../../docs/servers.md")
	must(t, err)
	rule := regexp.MustCompile("ACL SETUSER limiter on >secret (~rl:.*)").FindSubmatch(text)
	if rule == nil {
		t.Fatal("docs/servers.md names no ACL rule")
	}
	return strings.Fields(string(rule[1]))
}

// deniable returns the documented commands of a user that scripts run.
func deniable(t *testing.T) (commands []string) {
	t.Helper()
	for _, word := range documentedRule(t) {
		switch word {
		case "~rl:*", "+evalsha", "+evalsha_ro", "+script|load", "+ping", "+info", "+mget", "+getrange":
		default:
			commands = append(commands, strings.TrimPrefix(word, "+"))
		}
	}
	return commands
}

// denial is an operation whose user lacks a command.
type denial struct {
	limit   int // in storetest.Limits
	state   string
	op      algorithm.Operation
	command string
	buckets int
}

// denials are all combinations, in the same order each time.
func denials(commands []string) (all []denial) {
	states := slices.Sorted(maps.Keys(bucketStates(nil)))
	for limit := range storetest.Limits {
		for _, state := range states {
			for _, op := range []algorithm.Operation{algorithm.Check, algorithm.Charge, algorithm.Take, algorithm.Refund, algorithm.Penalize} {
				for _, command := range commands {
					for _, buckets := range []int{1, 3} {
						all = append(all, denial{limit, state, op, command, buckets})
					}
				}
			}
		}
	}
	return all
}

// TestDeniedCommandsLeaveNoPartialBucket denies a user a command of the scripts. Under every operation no bucket stays without expiry, and an operation that
// is reported as not executed has changed nothing.
func TestDeniedCommandsLeaveNoPartialBucket(t *testing.T) {
	t.Parallel()
	commands := deniable(t)
	server := undone(t, redistest.Start(t))
	allow := []any{"ACL", "SETUSER", "limiter", "reset", "on", ">secret", "~*", "+@all"}
	must(t, server.Client().Do(t.Context(), allow...).Err())
	now := time.UnixMicro(1_795_258_977_534_988)
	clocked := func(o *Options) { o.clock = func() time.Time { return now } }
	insider := newStore(t, newShard(t, ShardOptions{Primary: server.Addr()}), clocked)
	limiter := newStore(t, newShard(t, ShardOptions{Primary: server.Addr(), Credentials: login("limiter", "secret")}), clocked)
	outcomes := map[string]int{}
	all := denials(commands)
	for _, d := range sweep.Of(t, all, len(all)/10) {
		limit := storetest.Limits[d.limit]
		limit.Zone, limit.Window = fmt.Sprint("denied", d.limit), time.Hour
		what := fmt.Sprintf("%v of %d buckets %s of %v %v without %s", d.op, d.buckets, d.state, limit.Algorithm, limit.Align, d.command)
		must(t, server.Client().FlushDB(t.Context()).Err())
		reqs := takes(&limit, d.buckets)
		for i := range reqs {
			reqs[i].ID = fmt.Sprintf("before%d", i)
		}
		bucketStates(&now)[d.state](t, insider, reqs)
		if d.op != algorithm.Refund {
			for i := range reqs {
				reqs[i].ID = fmt.Sprintf("denied%d", i)
			}
		}
		before := store.Answers(t.Context(), insider.Peek, reqs)
		must(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "-"+d.command).Err())
		states := runOperation(t, limiter, d.op, reqs)
		must(t, server.Client().Do(t.Context(), "ACL", "SETUSER", "limiter", "+"+d.command).Err())
		after := store.Answers(t.Context(), insider.Peek, reqs)
		for i, st := range states {
			key := insider.asker.Keys.Key(&limit, reqs[i].ClientKey)
			if ttl := server.Client().PTTL(t.Context(), key).Val(); ttl == -1 {
				t.Fatalf("%s: the bucket never expires; error %v", what, st.Err)
			}
			switch {
			case st.Err == nil:
				outcomes["done"]++
			case errors.Is(st.Err, store.ErrUncertain):
				outcomes["uncertain"]++
			case !errors.Is(st.Err, store.ErrNotExecuted):
				t.Fatalf("%s: error %v", what, st.Err)
			case after[i] != before[i]:
				t.Fatalf("%s: error %v, but the bucket has changed\nfrom %+v\nto   %+v", what, st.Err, before[i], after[i])
			default:
				outcomes["refused"]++
			}
		}
	}
	if len(outcomes) != 3 {
		t.Errorf("outcomes are %v, want all three", outcomes)
	}
}

// runOperation runs op on a store.
func runOperation(t *testing.T, s *Store, op algorithm.Operation, reqs []store.Request) []store.State {
	t.Helper()
	switch op {
	case algorithm.Check:
		return store.Answers(t.Context(), s.Check, reqs)
	case algorithm.Charge:
		return store.Answers(t.Context(), s.Charge, reqs)
	case algorithm.Take:
		return store.Answers(t.Context(), s.Take, reqs)
	case algorithm.Refund:
		return store.Answers(t.Context(), s.Refund, reqs)
	default:
		return store.Answers(t.Context(), s.Penalize, reqs)
	}
}

// bucketStates put buckets into the states that scripts distinguish.
func bucketStates(now *time.Time) map[string]func(t *testing.T, s *Store, reqs []store.Request) {
	take := func(t *testing.T, s *Store, reqs []store.Request) {
		for i, st := range store.Answers(t.Context(), s.Take, reqs) {
			must(t, st.Err)
			reqs[i].Receipt = st.Receipt
			reqs[i].Until = now.Add(30 * time.Minute).UnixMicro()
		}
	}
	penalize := func(t *testing.T, s *Store, reqs []store.Request) {
		for i := range reqs {
			reqs[i].Until = now.Add(time.Minute).UnixMicro()
		}
		for _, st := range store.Answers(t.Context(), s.Penalize, reqs) {
			must(t, st.Err)
		}
	}
	return map[string]func(t *testing.T, s *Store, reqs []store.Request){
		"that do not exist": func(_ *testing.T, _ *Store, reqs []store.Request) {
			for i := range reqs {
				reqs[i].Until = now.Add(time.Minute).UnixMicro()
			}
		},
		"in use": take,
		"whose window has ended": func(t *testing.T, s *Store, reqs []store.Request) {
			take(t, s, reqs)
			*now = now.Add(90 * time.Minute)
			for i := range reqs {
				reqs[i].Until = now.Add(30 * time.Minute).UnixMicro()
			}
		},
		"under a penalty": penalize,
		"whose penalty has ended": func(t *testing.T, s *Store, reqs []store.Request) {
			penalize(t, s, reqs)
			*now = now.Add(2 * time.Minute)
			for i := range reqs {
				reqs[i].Until = now.Add(2 * time.Hour).UnixMicro()
			}
		},
	}
}
