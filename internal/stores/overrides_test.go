package stores

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/memory"
)

// lookedStore counts the looks at its overrides, which wait where ask is set.
type lookedStore struct {
	*memory.Store
	looks atomic.Int64
	ask   func(ctx context.Context) error
	// shows, if set, is what they see.
	shows func() ([]store.Override, error)
}

func (s *lookedStore) Overrides(ctx context.Context) ([]store.Override, error) {
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

// TestOverridesAreLookedAtOnceTheConfigRuns, and not where it is only validated.
func TestOverridesAreLookedAtOnceTheConfigRuns(t *testing.T) {
	s, h := openLooked(t, nil)
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Until: time.Now().Add(time.Hour).UnixMicro()}
	if err := s.SetOverride(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if n := s.looks.Load(); n != 0 {
		t.Errorf("there were %d looks before the config runs", n)
	}
	h.Run()
	if got, _ := h.OverridesOf("api", "alice", time.Now()); got == nil || *got != o {
		t.Errorf("the first request finds %v", got)
	}
}

// TestOverrideIsReadBack: one that cannot be read is an error, also where the look shows what it was to
// replace.
func TestOverrideIsReadBack(t *testing.T) {
	until := time.Now().Add(time.Hour).UnixMicro()
	o := store.Override{Kind: store.OverrideBlock, Zone: "api", ClientKey: "alice", Since: 1, Until: until}
	kept := []store.Override{}
	s, h := openLooked(t, nil)
	s.shows = func() ([]store.Override, error) { return kept, store.ErrDamaged }
	if err := h.SetOverride(t.Context(), o); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("the first one: %v", err)
	}
	kept = []store.Override{o}
	if err := h.SetOverride(t.Context(), o); err != nil {
		t.Errorf("one that is shown, beside damaged ones: %v", err)
	}
	o.Since, o.Until = 2, until+1
	if err := h.SetOverride(t.Context(), o); !errors.Is(err, store.ErrDamaged) {
		t.Errorf("one that was to replace it: %v", err)
	}
	kept[0].Since = 3
	if err := h.SetOverride(t.Context(), o); err != nil {
		t.Errorf("one that another has replaced: %v", err)
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
	if h.HasOverrides() || !ended.Load() {
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
	if block, _ := h.OverridesOf("api", "alice", time.Now()); block == nil {
		t.Error("the block is not known at once")
	}
	if removed, err := h.RemoveOverride(t.Context(), store.OverrideBlock, "api", "alice"); !removed || err != nil || h.HasOverrides() {
		t.Errorf("its end is not known at once, removed %v, %v", removed, err)
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
	if err := s.SetOverride(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	follower := newOverrides(s, 24*time.Hour, func() {}, func(error) {})
	defer follower.stop()
	for len(follower.known()) == 0 {
		time.Sleep(time.Millisecond) // the test's timeout ends this
	}
}
