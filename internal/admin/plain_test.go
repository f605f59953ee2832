package admin

import (
	"errors"
	"net/http"
	"testing"
	"time"

	"github.com/caddyserver/caddy/v2"
	"go.uber.org/zap"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/limiter"
	"github.com/shardlimit/caddy-shardlimit/internal/memory"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// plainModule opens a store that is not operable.
type plainModule struct{}

func (plainModule) OpenStore(string) (store.Store, error) {
	return struct{ store.Store }{memory.New(memory.NewBuckets(), memory.Options{})}, nil
}
func (plainModule) CloseStore()            {}
func (plainModule) OnErrorDefault() string { return stores.OnErrorAllow }

// TestPlainStoreSaysSo where it would have to be operable.
func TestPlainStoreSaysSo(t *testing.T) {
	handle := &stores.Handle{Name: t.Name(), Module: plainModule{}, Logger: zap.NewNop()}
	open, err := handle.Enter()
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Unload()
	zone := zoneInStore{Zone: &limiter.Zone{Name: "api"}, store: handle}
	_, err = (&selection{zoneInStore: zone, open: open}).inspect(t.Context())
	if answer := (caddy.APIError{}); !errors.As(err, &answer) || answer.HTTPStatus != http.StatusNotImplemented {
		t.Errorf("a look at a bucket: %v", err)
	}
	near := adminapi.Near{}
	(&scan{zones: []zoneInStore{zone}, found: []*nearest{{into: &near}}}).run(handle)
	if len(near.Unlisted) != 1 {
		t.Errorf("clients near their limit: %+v", near)
	}
	if found := diagnose(t.Context(), handle).Findings; len(found) != 1 || found[0].Code != "unchecked" {
		t.Errorf("a diagnosis: %+v", found)
	}
	if err := handle.SetOverride(t.Context(), store.Override{}); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("an override: %v", err)
	}
	if status := statusOfStore(handle); status.Buckets != nil || status.Shards != nil || len(problemsOf(open, time.Now(), nil)) != 0 {
		t.Errorf("its status: %+v", status)
	}
	r := store.Request{Limit: &store.Limit{Zone: "api", Window: 1e9}, ClientKey: "alice", Events: 3, Cost: 1}
	if st := open.Peek(t.Context(), r); st.Err != nil || !st.Allowed || st.Remaining != 3 {
		t.Errorf("what is in a bucket: %+v", st)
	}
}
