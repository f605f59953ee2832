package operate

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/internal/redistest"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// watch calls before and, unless it is nil, after with the name of each command of an operator.
func watch(p *Operator, before func(name string, reads bool), after func(name string)) {
	ask := p.ask
	p.ask = func(ctx context.Context, shard *Shard, key string, reads bool, about func(isReplica bool) *wire.Command) (*wire.Command, error) {
		cmd, name := about(false), "a script"
		if !cmd.IsScript() {
			name = fmt.Sprint(cmd.Args()[0])
		}
		before(name, reads)
		if after != nil {
			defer after(name)
		}
		return ask(ctx, shard, key, reads, about)
	}
}

// looks reads the overrides, and waits for the mending that this starts.
func looks(t *testing.T, p *Operator) *store.OverrideSet {
	t.Helper()
	set, err := p.Overrides(t.Context())
	must(t, err)
	p.overrides.mending.Lock()
	defer p.overrides.mending.Unlock()
	return set
}

// newKeeper returns an operator that mends at each look, and its server.
func newKeeper(t *testing.T) (*Operator, *redistest.Server) {
	t.Helper()
	server := redistest.Start(t)
	return newOperator(t, wire.Options{Primary: server.Addr()}, func(p *Operator) { p.mendPeriod, p.followPeriod = 0, 0 }), server
}

// TestNewServerGetsNothing until it has been followed for a while, because it may be foreign.
func TestNewServerGetsNothing(t *testing.T) {
	t.Parallel()
	p, server := newKeeper(t)
	mustChange(t, p, limitsOf("x", 1))
	key := p.asker.Keys.Overrides()
	must(t, server.Client().Del(t.Context(), key).Err())
	p.followPeriod = time.Hour
	for range 3 {
		looks(t, p)
	}
	if server.Client().Exists(t.Context(), key).Val() != 0 {
		t.Error("overrides are written to it at once")
	}
	p.followPeriod = time.Since(p.members[0].Shard.Standing().Since)
	looks(t, p)
	if server.Client().Exists(t.Context(), key).Val() == 0 {
		t.Error("overrides are never written to it")
	}
}

// TestMoreOverridesThanStoresKeep are not read, and not tried again for a while.
func TestMoreOverridesThanStoresKeep(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	writer, changes := newOperator(t, wire.Options{Primary: server.Addr()}, nil), limitsOf("x", 2*3+ownFields+1)
	mustChange(t, writer, changes)
	var passed atomic.Int64
	p := newOperator(t, wire.Options{Primary: server.Addr()}, func(p *Operator) {
		p.most, p.now = 3, func() time.Time { return time.Now().Add(time.Duration(passed.Load())) }
	})
	scripts := 0
	watch(p, func(name string, _ bool) {
		if name == "a script" {
			scripts++
		}
	}, nil)
	for range 3 {
		if set, err := p.Overrides(t.Context()); !errors.Is(err, store.ErrFinal) || set.Len() > 0 || scripts != 1 {
			t.Fatalf("%d are read with %d scripts, %v", set.Len(), scripts, err)
		}
	}
	must(t, server.Client().Del(t.Context(), p.asker.Keys.Overrides(), p.asker.Keys.OverrideLog()).Err())
	mustChange(t, newOperator(t, wire.Options{Primary: server.Addr()}, nil), changes[:2])
	passed.Store(int64(p.mendPeriod))
	if set := looks(t, p); set.Len() != 2 {
		t.Errorf("%d are read once there are 2", set.Len())
	}
}

// TestRepliesTooLargeForTheServer are no silent loss: what the server cannot send is told once that goes on, and what
// it can send holds.
func TestRepliesTooLargeForTheServer(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	opts, changes := wire.Options{Primary: server.Addr()}, limitsOf("x", 150)
	writer := newOperator(t, opts, nil)
	for n := range 4 {
		for i := range changes {
			changes[i].Events = int64(n)
		}
		mustChange(t, writer, changes)
	}
	size := 0
	for name, value := range server.Client().HGetAll(t.Context(), writer.asker.Keys.Overrides()).Val() {
		size += len(name) + len(value)
	}
	limit := func(bytes int) {
		must(t, server.Client().ConfigSet(t.Context(), "client-output-buffer-limit", fmt.Sprintf("normal %d 0 0", bytes)).Err())
	}
	limit(2 * size)
	if _, err := writer.Audit(t.Context()); err == nil {
		t.Fatal("the log is smaller")
	}
	if set := looks(t, newOperator(t, opts, nil)); set.Len() != len(changes) {
		t.Errorf("%d are read although only the log is too large", set.Len())
	}
	// Shorter replies have a buffer of their own.
	limit(1)
	p := newOperator(t, opts, nil)
	for n := range mostMisread {
		if set, err := p.Overrides(t.Context()); set.Len() > 0 || err == nil || errors.Is(err, store.ErrFinal) != (n == mostMisread-1) || store.KindOf(err) != store.KindConnection {
			t.Errorf("look %d: %d are read, %v", n, set.Len(), err)
		}
	}
	limit(0)
	if set := looks(t, p); set.Len() != len(changes) {
		t.Errorf("%d are read in the end", set.Len())
	}
}

// TestRightThatIsGiven counts at the next look: nothing but a content beyond the bounds is left alone for a while.
func TestRightThatIsGiven(t *testing.T) {
	t.Parallel()
	server := redistest.Start(t)
	mustChange(t, newOperator(t, wire.Options{Primary: server.Addr()}, nil), limitsOf("x", 1))
	permit := func(rules ...any) {
		must(t, server.Client().Do(t.Context(), append([]any{"ACL", "SETUSER", "limiter"}, rules...)...).Err())
	}
	t.Cleanup(func() { must(t, server.Client().Do(context.Background(), "ACL", "DELUSER", "limiter").Err()) })
	// The second one lacks the log alone.
	for _, lacking := range [][]any{{"-eval", "-evalsha", "-evalsha_ro", "-eval_ro"}, {"-zrange"}} {
		permit(append([]any{"reset", "on", ">secret", "~*", "+@all"}, lacking...)...)
		p := newOperator(t, wire.Options{Primary: server.Addr(), Credentials: login("limiter", "secret")}, nil)
		if set, err := p.Overrides(t.Context()); store.KindOf(err) != store.KindAuth {
			t.Fatalf("%d are read without %v, %v", set.Len(), lacking, err)
		}
		permit("+@all")
		if set := looks(t, p); set.Len() != 1 {
			t.Errorf("%d are read with %v", set.Len(), lacking)
		}
	}
}

// TestMendingHoldsUpNobody, and asks no replica.
func TestMendingHoldsUpNobody(t *testing.T) {
	t.Parallel()
	p, server := newKeeper(t)
	mustChange(t, p, limitsOf("x", 1))
	must(t, server.Client().Del(t.Context(), p.asker.Keys.Overrides()).Err())
	looks(t, p)
	goOn, isMending := make(chan bool), make(chan bool, 1)
	watch(p, func(name string, _ bool) {
		if name == "set" {
			isMending <- true
			<-goOn
		}
	}, nil)
	for range 3 {
		if set, err := p.Overrides(t.Context()); err != nil || set.Len() != 1 {
			t.Errorf("there are %d, %v", set.Len(), err)
		}
	}
	<-isMending
	watch(p, func(name string, reads bool) {
		if reads {
			t.Errorf("a replica may answer %s", name)
		}
	}, nil)
	close(goOn)
	p.overrides.mending.Lock()
	defer p.overrides.mending.Unlock()
	if server.Client().Exists(t.Context(), p.asker.Keys.Overrides()).Val() == 0 {
		t.Error("nothing is mended")
	}
}

// TestWhatRunsOut checks that an ended override is removed from a server without reading its hash.
func TestWhatRunsOut(t *testing.T) {
	t.Parallel()
	p, server := newKeeper(t)
	changes := limitsOf("x", 2)
	changes[0].Until = time.Now().Add(time.Second).UnixMicro()
	mustChange(t, p, changes)
	looks(t, p)
	watch(p, func(name string, _ bool) {
		if name == "zrange" {
			t.Error("the hash and the log are read")
		}
	}, nil)
	eventually(t, "it is removed", func() error {
		looks(t, p)
		if server.Client().HExists(t.Context(), p.asker.Keys.Overrides(), "limit:api:tag:x0").Val() {
			return fmt.Errorf("it is there")
		}
		return nil
	})
}

// TestWrittenBackIsTold checks that the log says written back only if the server took some: one without room takes none.
func TestWrittenBackIsTold(t *testing.T) {
	t.Parallel()
	p, server := newKeeper(t)
	p.most = 1
	mustChange(t, p, limitsOf("x", 1))
	key, all := p.asker.Keys.Overrides(), []string{"junk0", "", "junk1", "", "junk2", "", "junk3", "", "junk4", "", "junk5", "", "junk6", ""}
	must(t, server.Client().Del(t.Context(), key).Err())
	must(t, server.Client().HSet(t.Context(), key, all).Err())
	shard, events := p.members[0].Shard, make(chan wire.Event, 100)
	defer shard.Listen(func(e wire.Event) { events <- e })()
	told := func() (n int) {
		for range 3 {
			looks(t, p)
		}
		shard.Emit(wire.Event{Kind: wire.ClockJumped})
		for e := range events {
			if e.Kind == wire.ClockJumped {
				return n
			}
			if e.Kind == wire.WrittenBack {
				n++
			}
		}
		return n
	}
	if n := told(); n > 0 {
		t.Errorf("it is told %d times of a server without room", n)
	}
	must(t, server.Client().HDel(t.Context(), key, "junk0", "junk1", "junk2", "junk3", "junk4", "junk5", "junk6").Err())
	n := 0
	redistest.Eventually(t, "it is written back and told", func() error {
		if n += told(); n == 0 {
			return errors.New("it is not told yet")
		}
		return nil
	})
	if n += told(); n != 1 {
		t.Errorf("it is told %d times", n)
	}
}

// TestUnsoundValueIsDeleted by hand, which moves neither sum nor number, and is no problem any more.
func TestUnsoundValueIsDeleted(t *testing.T) {
	t.Parallel()
	other, server := newKeeper(t)
	mustChange(t, other, limitsOf("x", 1))
	key := other.asker.Keys.Overrides()
	must(t, server.Client().HSet(t.Context(), key, "junk", "").Err())
	p := newOperator(t, wire.Options{Primary: server.Addr()}, func(p *Operator) { p.mendPeriod, p.followPeriod = 0, 0 })
	if looks(t, p).Damaged() == nil {
		t.Error("it is no problem")
	}
	must(t, server.Client().HDel(t.Context(), key, "junk").Err())
	for range 2 {
		looks(t, p)
	}
	must(t, looks(t, p).Damaged())
}

// TestClockIsSetDuringALook checks that ends read before this machine's clock was set are read again.
func TestClockIsSetDuringALook(t *testing.T) {
	t.Parallel()
	first, server := newKeeper(t)
	changes := limitsOf("x", 1)
	changes[0].Until = time.Now().Add(time.Hour).UnixMicro()
	mustChange(t, first, changes)
	ahead := time.Duration(0)
	p := newOperator(t, wire.Options{Primary: server.Addr()}, nil)
	p.now = func() time.Time { return time.Now().Add(ahead) }
	watch(p, func(name string, _ bool) {
		if name == "zrange" {
			ahead = 30 * time.Minute // the pages have been read
		}
	}, nil)
	looks(t, p)
	o := looks(t, p).Of(changes[0].ID(), 0)
	if o == nil {
		t.Fatal("there is none")
	}
	if left := o.Until - p.now().UnixMicro(); left < (59 * time.Minute).Microseconds() {
		t.Errorf("it ends in %v", time.Duration(left)*time.Microsecond)
	}
}

// TestMendingIsBounded in bytes, so that an evicting server has time.
func TestMendingIsBounded(t *testing.T) {
	p := newOperator(t, wire.Options{Primary: "127.0.0.1:1"}, nil)
	s := &overrideState{all: map[string]*overrideVersion{}}
	for i := range 5 {
		s.all[fmt.Sprint(i)] = &overrideVersion{keep: store.NoEnd, content: strings.Repeat("x", mendBytes/3)}
	}
	if items := p.lacking(&reading{}, s); len(items) != 2 {
		t.Errorf("%d are written", len(items))
	}
}

// TestLogOfAClockAhead is put at the present, or it would stay the latest.
func TestLogOfAClockAhead(t *testing.T) {
	t.Parallel()
	p, server := newKeeper(t)
	entry := strings.Join([]string{"1", fmt.Sprint(time.Now().AddDate(1, 0, 0).UnixMilli()), "limit:api:tag:x", "{}", "", "x"}, "\n")
	_, err := p.runOverride(t.Context(), p.members[0].Shard, opLog, entry)
	must(t, err)
	if score := server.Client().ZScore(t.Context(), p.asker.Keys.OverrideLog(), entry).Val(); score < 1 || score > float64(time.Now().Add(time.Hour).UnixMicro()) {
		t.Errorf("its score is %v", score)
	}
}

// TestEqualVersionsAreRemembered as long as the one that lasts longer.
func TestEqualVersionsAreRemembered(t *testing.T) {
	now := time.Now()
	short, long := &overrideVersion{id: "x", keep: now.Add(time.Hour).UnixMicro()}, &overrideVersion{id: "x", keep: now.Add(2 * time.Hour).UnixMicro()}
	if a, b := short.over(long, now), long.over(short, now); a.keep != long.keep || b.keep != long.keep {
		t.Errorf("they are remembered until %d and %d, want %d", a.keep, b.keep, long.keep)
	}
}
