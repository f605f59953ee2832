package stores

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// lookedStore counts the looks at its overrides, which wait where ask is set.
type lookedStore struct {
	*memory.Store
	looks atomic.Int64
	ask   func(ctx context.Context) error
	// shows, if set, is what they see.
	shows func() (*store.OverrideSet, error)
}

func (s *lookedStore) Overrides(ctx context.Context) (*store.OverrideSet, error) {
	s.looks.Add(1)
	if s.ask != nil {
		if err := s.ask(ctx); err != nil {
			return nil, err
		}
	}
	if s.shows != nil {
		return s.shows()
	}
	return s.Store.Overrides(ctx)
}

// lookedModule opens one.
type lookedModule struct{ looked *lookedStore }

func (m lookedModule) OpenStore(string) (store.Store, error) { return m.looked, nil }
func (lookedModule) CloseStore()                             {}
func (lookedModule) OnErrorDefault() string                  { return OnErrorAllow }

func openLooked(t *testing.T, ask func(ctx context.Context) error) (*lookedStore, *Handle) {
	t.Helper()
	s := &lookedStore{Store: memory.New(memory.NewBuckets(), memory.Options{}), ask: ask}
	h := &Handle{Name: t.Name(), Module: lookedModule{s}, Logger: zap.NewNop()}
	if _, err := h.Enter(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Unload)
	return s, h
}

func set(t *testing.T, s *lookedStore, o store.Override) {
	t.Helper()
	outcomes := s.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Expected: store.AnyVersion}})
	if err := outcomes[0].Err; err != nil {
		t.Fatal(err)
	}
}

// TestOverridesAreLookedAtOnceTheConfigRuns, and not where it is only validated.
func TestOverridesAreLookedAtOnceTheConfigRuns(t *testing.T) {
	s, h := openLooked(t, nil)
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Until: time.Now().Add(time.Hour).UnixMicro()}
	set(t, s, o)
	if n := s.looks.Load(); n != 0 {
		t.Errorf("there were %d looks before the config runs", n)
	}
	h.Run()
	if got := h.OverridesOf("api", "alice", time.Now).Block; got == nil || got.Until != o.Until {
		t.Errorf("the first request finds %v", got)
	}
}

// TestOverridesAreLookedAtAgainOnceTheConfigRuns, at once: requests that it served before had the overrides of another config.
func TestOverridesAreLookedAtAgainOnceTheConfigRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := openLooked(t, nil)
		h.OverridesOf("api", "alice", time.Now)
		set(t, s, store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Until: time.Now().Add(time.Hour).UnixMicro()})
		h.Run()
		synctest.Wait()
		if n := s.looks.Load(); n != 2 || h.OverridesOf("api", "alice", time.Now).Block == nil {
			t.Errorf("after %d looks the override is not known", n)
		}
		h.open.Load().overrides.stop()
		synctest.Wait()
	})
}

// TestOverrideIsReadBack: one that cannot be read is an error, also where the look shows what it was to
// replace.
func TestOverrideIsReadBack(t *testing.T) {
	until := time.Now().Add(time.Hour).UnixMicro()
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Since: 1, Until: until}
	kept := map[store.OverrideID]*store.Override{}
	s, h := openLooked(t, nil)
	s.shows = func() (*store.OverrideSet, error) {
		return store.NewOverrideSet(kept, map[store.OverrideID]error{o.ID(): store.ErrDamaged}), nil
	}
	if err := h.SetOverride(t.Context(), o); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("the first one: %v", err)
	}
	shown := o
	kept[o.ID()] = &shown
	if err := h.SetOverride(t.Context(), o); err != nil {
		t.Errorf("one that is shown, beside damaged ones: %v", err)
	}
	o.Since, o.Until = 2, until+1
	if err := h.SetOverride(t.Context(), o); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("one that was to replace it: %v", err)
	}
	shown.Since = 3
	if err := h.SetOverride(t.Context(), o); err != nil {
		t.Errorf("one that another has replaced: %v", err)
	}
	ended := func() error {
		outcomes, err := h.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}})
		if err != nil || outcomes[0].Before == nil {
			t.Fatalf("the end: %+v, %v", outcomes, err)
		}
		return outcomes[0].Err
	}
	if err := ended(); err != nil {
		t.Errorf("the end of one that another has replaced: %v", err)
	}
	set(t, s, o)
	shown.Since = o.Since
	if err := ended(); !errors.Is(err, errStillThere) {
		t.Errorf("the end of one that still holds: %v", err)
	}
}

// TestOverrideThatIsOvertaken by another change is no failure of the store.
func TestOverrideThatIsOvertaken(t *testing.T) {
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Since: 2, Until: time.Now().Add(time.Hour).UnixMicro()}
	earlier, kept := o, map[store.OverrideID]*store.Override{}
	earlier.Since = 1
	s, h := openLooked(t, nil)
	damaged := map[store.OverrideID]error{{Kind: store.OverrideBlock, Zone: "other"}: store.ErrDamaged}
	s.shows = func() (*store.OverrideSet, error) { return store.NewOverrideSet(kept, damaged), nil }
	for _, there := range []*store.Override{nil, &earlier} {
		if there != nil {
			kept[o.ID()] = there
		}
		outcomes, err := h.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Expected: store.AnyVersion}})
		if err != nil || !errors.Is(outcomes[0].Err, store.ErrChanged) || outcomes[0].Before != there {
			t.Errorf("where there is %v: %+v, %v", there, outcomes, err)
		}
	}
}

// TestFirstRequestsWaitForOverrides, but not for a store that does not answer.
func TestFirstRequestsWaitForOverrides(t *testing.T) {
	var ended atomic.Bool
	_, h := openLooked(t, func(ctx context.Context) error {
		<-ctx.Done()
		ended.Store(true)
		return ctx.Err()
	})
	// Nothing has called Run, as for a request that a reload has overtaken.
	if h.OverridesOf("api", "alice", time.Now).Block != nil || !ended.Load() {
		t.Errorf("the request did not wait for the first look: %v", ended.Load())
	}
}

// TestLateLookUndoesNoChange: one that began before a change ends before it is looked at.
func TestLateLookUndoesNoChange(t *testing.T) {
	began, goOn := make(chan struct{}, 10), make(chan struct{})
	_, h := openLooked(t, func(context.Context) error {
		began <- struct{}{}
		<-goOn
		return nil
	})
	h.Run()
	<-began
	done := make(chan error)
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Until: time.Now().Add(time.Hour).UnixMicro()}
	go func() { done <- h.SetOverride(t.Context(), o) }()
	goOn <- struct{}{}
	close(goOn)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if h.OverridesOf("api", "alice", time.Now).Block == nil {
		t.Error("the block is not known at once")
	}
	outcomes, err := h.ChangeOverrides(t.Context(), []store.OverrideChange{{Override: o, Removes: true, Expected: store.AnyVersion}})
	if err != nil || outcomes[0].Before == nil || outcomes[0].Err != nil || h.OverridesOf("api", "alice", time.Now).Block != nil {
		t.Errorf("its end is not known at once: %+v, %v", outcomes, err)
	}
}

// TestFailedLookIsRepeatedSoon, however long answers are trusted.
func TestFailedLookIsRepeatedSoon(t *testing.T) {
	s, _ := openLooked(t, nil)
	away := true
	s.ask = func(context.Context) error {
		defer func() { away = false }()
		if away {
			return store.ErrNotExecuted
		}
		return nil
	}
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Until: time.Now().Add(time.Hour).UnixMicro()}
	set(t, s, o)
	follower := newOverrides(s, 24*time.Hour, func() {})
	defer follower.stop()
	for deadline := time.Now().Add(time.Minute); follower.known().Len() == 0; {
		if time.Now().After(deadline) {
			t.Fatal("the look that failed is not repeated within a minute")
		}
		time.Sleep(time.Millisecond) // no event tells of a look
	}
}

// TestFinalErrorIsNotRepeatedSoon: the next look is after the normal period.
func TestFinalErrorIsNotRepeatedSoon(t *testing.T) {
	s, _ := openLooked(t, func(context.Context) error { return store.ErrFinal })
	synctest.Test(t, func(*testing.T) {
		follower := newOverrides(s, time.Hour, func() {})
		follower.start()
		time.Sleep(90 * time.Minute) // on the clock of the bubble
		follower.stop()
		synctest.Wait()
	})
	if n := s.looks.Load(); n != 2 {
		t.Errorf("there were %d looks", n)
	}
}

// TestEndedConfigLooksNoMore, while its requests go on.
func TestEndedConfigLooksNoMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, h := openLooked(t, nil)
		if _, err := h.Enter(); err != nil {
			t.Fatal(err)
		}
		h.Run()
		time.Sleep(time.Minute)
		h.Unload()
		synctest.Wait()
		n := s.looks.Load()
		if time.Sleep(time.Minute); n == 0 || s.looks.Load() != n {
			t.Errorf("there were %d looks, and then %d", n, s.looks.Load())
		}
	})
}

// TestPanicsOfAStoreAreProblems, leave what is known, and end no loop.
func TestPanicsOfAStoreAreProblems(t *testing.T) {
	s, _ := openLooked(t, nil)
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Until: time.Now().Add(time.Hour).UnixMicro()}
	set(t, s, o)
	kept := newSharedStore()
	s.ask = func(context.Context) error {
		if kept.panics.Load() {
			panic("broken on purpose")
		}
		return nil
	}
	synctest.Test(t, func(t *testing.T) {
		all, others := newOverrides(s, time.Second, func() {}), newPresence(t.Name(), kept)
		all.start()
		others.start()
		for _, panics := range []bool{false, true, false} {
			kept.panics.Store(panics)
			time.Sleep(3 * presencePeriod) // on the clock of the bubble
			synctest.Wait()
			opened := &Opened{overrides: all, presence: others}
			if isProblem := opened.OverridesFailed() != nil; isProblem != panics || all.known().Len() != 1 {
				t.Errorf("panics %v: the problem is %v, %d are known", panics, opened.OverridesFailed(), all.known().Len())
			}
			if n := len(opened.Disagreements()); n > 0 != panics {
				t.Errorf("panics %v: the disagreements are %q", panics, opened.Disagreements())
			}
		}
		all.stop()
		others.stop()
		synctest.Wait()
	})
}
