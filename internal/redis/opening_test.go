package redis

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// openings is a store that opens windows without scripts once it has heard the primary's time.
type openings struct {
	*Store
	server *redistest.Server
}

func newOpenings(t *testing.T) openings {
	t.Helper()
	sh := redistest.StartShard(t, 0)
	shard := shardOf(t, sh)
	s := newStore(t, shard, func(o *Options) { o.ReadPrimary = true })
	// The first call begins the examination of the servers.
	must(t, store.Answers(t.Context(), s.Check, oneOf("first"))[0].Err)
	awaitOpenings(t, s, shard)
	return openings{s, sh.Primary}
}

// awaitOpenings waits until the only server of a shard is known to open windows without scripts.
func awaitOpenings(t *testing.T, s *Store, shard *Shard) {
	t.Helper()
	eventually(t, "windows open without scripts", func() error {
		hearTime(t, s, "heard")
		must(t, store.Answers(t.Context(), s.Check, oneOf("unknown"))[0].Err)
		if !shard.Owner(0).Checks.Opens() {
			return errors.New("it is not known")
		}
		return nil
	})
}

// opened is the answer to a check, and how many scripts ran for it.
type opened struct {
	r       store.Request
	st      store.State
	scripts int64
}

// check checks a bucket, which prepare makes, soon after the primary's time was heard.
func (o openings) check(t *testing.T, prepare func(key string, now time.Time)) opened {
	t.Helper()
	return inTime(t, func(n int) opened {
		r := plainRequest(1)
		r.Limit.Window = time.Hour
		r.ClientKey = fmt.Sprint(t.Name(), n)
		prepare(o.asker.Keys.Key(r.Limit, r.ClientKey), time.Now())
		hearTime(t, o.Store, "heard")
		got := opened{r: r}
		got.scripts = scripts(t, o.server, func() { got.st = store.Answers(t.Context(), o.Check, []store.Request{r})[0] })
		return got
	})
}

// outlives requires that a bucket lives longer than its window, and not much.
func (o openings) outlives(t *testing.T, got opened) {
	t.Helper()
	eventually(t, "the bucket lives as long as its window", func() error {
		fields, ttl := fieldsOf(t, o.Store, o.server, got.r)
		left := time.Until(time.UnixMicro(got.st.Reset))
		if fields["r"] != fmt.Sprint(got.st.Reset) || ttl < left || ttl > left+3*time.Second {
			return fmt.Errorf("it is %v with %v to live, the window has %v", fields, ttl, left)
		}
		return nil
	})
}

// TestWindowsOpenWithoutScripts: other stores see the same window, an orphan gets one and keeps its
// count, and what the script has to do is left to it.
func TestWindowsOpenWithoutScripts(t *testing.T) {
	t.Parallel()
	o := newOpenings(t)
	client := o.server.Client()
	for name, c := range map[string]struct {
		prepare func(key string, now time.Time)
		used    int64
		scripts int64
	}{
		"nothing is there": {func(string, time.Time) {}, 0, 0},
		"an orphan":        {func(key string, _ time.Time) { must(t, client.HSet(t.Context(), key, "c", 5).Err()) }, 5, 0},
		"a window without expiry": {func(key string, now time.Time) {
			must(t, client.HSet(t.Context(), key, "c", 5, "r", now.Add(time.Minute).UnixMicro()).Err())
		}, 5, 0},
		"an old window": {func(key string, now time.Time) {
			must(t, client.HSet(t.Context(), key, "c", 5, "r", now.Add(-time.Millisecond).UnixMicro()).Err())
		}, 0, 1},
		"an end that cannot be": {func(key string, now time.Time) {
			must(t, client.HSet(t.Context(), key, "c", 5, "r", now.Add(100*time.Hour).UnixMicro()).Err())
		}, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			got := o.check(t, c.prepare)
			if got.st.Err != nil || got.st.Used != c.used || got.scripts != c.scripts {
				t.Fatalf("%+v, by %d scripts, want %d used, by %d", got.st, got.scripts, c.used, c.scripts)
			}
			if name != "a window without expiry" {
				o.outlives(t, got)
			} else if _, ttl := fieldsOf(t, o.Store, o.server, got.r); ttl <= 0 {
				t.Error("it never expires")
			}
			other := newStore(t, newShard(t, ShardOptions{Primary: o.server.Addr()}), nil)
			if st := store.Answers(t.Context(), other.Check, []store.Request{got.r})[0]; st.Err != nil || st.Reset != got.st.Reset || st.Used != got.st.Used {
				t.Errorf("another store sees %+v, not %+v", st, got.st)
			}
		})
	}
}

// TestOpeningLeavesForeignDataAsItIs: with its fields, and without an expiry, or with its own. The
// script says what is wrong.
func TestOpeningLeavesForeignDataAsItIs(t *testing.T) {
	t.Parallel()
	o := newOpenings(t)
	client := o.server.Client()
	for name, put := range intruders {
		for _, lives := range []time.Duration{0, time.Minute} {
			before, own := "", ""
			got := o.check(t, func(key string, _ time.Time) {
				own = key
				must(t, client.Del(t.Context(), key).Err())
				must(t, put(t.Context(), client, key))
				if lives > 0 {
					must(t, client.PExpire(t.Context(), key, lives).Err())
				}
				before = client.Dump(t.Context(), key).Val()
			})
			if store.KindOf(got.st.Err) != store.KindForeignData || got.scripts != 1 {
				t.Errorf("%s: %+v by %d scripts", name, got.st, got.scripts)
			}
			if client.Dump(t.Context(), own).Val() != before {
				t.Errorf("%s has changed", name)
			}
			if ttl := client.PTTL(t.Context(), own).Val(); ttl > lives || (ttl > 0) != (lives > 0) {
				t.Errorf("%s expires in %v, was to in %v", name, ttl, lives)
			}
			if n := inTime(t, func(int) int64 {
				hearTime(t, o.Store, "heard")
				return scripts(t, o.server, func() {
					r := plainRequest(1)
					r.Limit.Window, r.ClientKey = time.Hour, fmt.Sprint(name, lives, time.Now().UnixNano())
					must(t, store.Answers(t.Context(), o.Check, []store.Request{r})[0].Err)
				})
			}); n != 0 {
				t.Errorf("after %s an opening takes %d scripts", name, n)
			}
		}
	}
}

// TestOpeningThatIsRefusedBoundsNothing: a full server adds no field, and does set an expiry.
func TestOpeningThatIsRefusedBoundsNothing(t *testing.T) {
	t.Parallel()
	o := newOpenings(t)
	client := o.server.Client()
	own := ""
	got := inTime(t, func(n int) store.State {
		r := plainRequest(1)
		r.Limit.Window, r.ClientKey = time.Hour, fmt.Sprint(t.Name(), n)
		own = o.asker.Keys.Key(r.Limit, r.ClientKey)
		must(t, client.HSet(t.Context(), own, "name", "x").Err())
		hearTime(t, o.Store, "heard")
		must(t, client.ConfigSet(t.Context(), "maxmemory", "1").Err())
		defer func() { must(t, client.ConfigSet(t.Context(), "maxmemory", "0").Err()) }()
		return store.Answers(t.Context(), o.Check, []store.Request{r})[0]
	})
	if ttl := client.PTTL(t.Context(), own).Val(); got.Err == nil || ttl > 0 {
		t.Errorf("%+v, and the data expires in %v", got, ttl)
	}
}

// TestPenaltyOfABucketWithoutWindow gives it one, so that no opening meets a bucket that expires with
// its penalty.
func TestPenaltyOfABucketWithoutWindow(t *testing.T) {
	t.Parallel()
	o := newOpenings(t)
	r := plainRequest(1)
	r.Limit.Window, r.Until = time.Hour, time.Now().Add(time.Minute).UnixMicro()
	st := store.Answers(t.Context(), o.Penalize, []store.Request{r})[0]
	must(t, st.Err)
	fields, ttl := fieldsOf(t, o.Store, o.server, r)
	if fields["r"] == "" || fields["p"] == "" || ttl < 59*time.Minute {
		t.Errorf("the bucket is %v with %v to live", fields, ttl)
	}
}

// TestRefusedOpeningIsLeftToTheScript, from then on.
func TestRefusedOpeningIsLeftToTheScript(t *testing.T) {
	t.Parallel()
	o := newOpenings(t)
	must(t, undone(t, o.server).Client().Do(t.Context(), "ACL", "SETUSER", "default", "-hsetnx").Err())
	for range 2 {
		got := o.check(t, func(string, time.Time) {})
		if got.st.Err != nil || got.scripts != 1 {
			t.Errorf("%+v by %d scripts", got.st, got.scripts)
		}
		o.outlives(t, got)
	}
	// Charges stay plain.
	if n := inTime(t, func(int) int64 {
		r := plainRequest(1)
		r.Until = openWindow(t, o.Store, r)
		hearTime(t, o.Store, "heard")
		return scripts(t, o.server, func() { must(t, reported(t, o.Store, r)[0].Err) })
	}); n != 0 {
		t.Errorf("the charge took %d scripts", n)
	}
}

// TestOpeningWhereWritesAreRefused: a window that is open is shown, as before, and none is opened.
func TestOpeningWhereWritesAreRefused(t *testing.T) {
	t.Parallel()
	o := newOpenings(t)
	client := o.server.Client()
	full := func(n string) { must(t, client.ConfigSet(t.Context(), "maxmemory", n).Err()) }
	for name, c := range map[string]struct {
		isOpen bool
		used   int64
	}{"an open window": {true, 5}, "no window": {false, 0}} {
		t.Run(name, func(t *testing.T) {
			got := inTime(t, func(n int) store.State {
				r := plainRequest(1)
				r.Limit.Window = time.Hour
				r.ClientKey = fmt.Sprint(t.Name(), n)
				if c.isOpen {
					key := o.asker.Keys.Key(r.Limit, r.ClientKey)
					must(t, client.HSet(t.Context(), key, "c", 5, "r", time.Now().Add(time.Hour).UnixMicro()).Err())
				}
				hearTime(t, o.Store, "heard")
				full("1")
				defer full("0")
				return store.Answers(t.Context(), o.Check, []store.Request{r})[0]
			})
			if (got.Err == nil) != c.isOpen || got.Used != c.used {
				t.Errorf("got %+v, want %d used, or an error without a window", got, c.used)
			}
		})
	}
}
