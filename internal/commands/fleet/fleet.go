// Package fleet makes the admin APIs of several Caddys one: an [API] asks them all at the same
// time and answers in the form in which one Caddy does, and sends changes to those that have to make them. How
// answers are merged are pure functions over the types of internal/adminapi.
package fleet

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
)

// Caller is the admin API of a Caddy.
type Caller interface {
	// Call sends one request, whose path includes the query, and returns the answer
	// whatever its status. An error means that there is no answer.
	Call(ctx context.Context, method, path string, body []byte) (status int, answer []byte, err error)
}

// Member is a Caddy of the fleet.
type Member struct {
	// Address is how the Caddy is named in answers.
	Address string
	Caller
}

// API is the admin API of a fleet. It is a [Caller].
type API struct{ members []Member }

// New returns the API of at least two Caddys.
func New(members []Member) *API { return &API{members} }

// root is the path of the admin API.
const root = "/rate_limit/"

const (
	// stateTimeout bounds the wait for an answer for which a Caddy calls no server, and
	// serversTimeout for one for which it waits up to five seconds for servers.
	stateTimeout   = 2 * time.Second
	serversTimeout = 7 * time.Second
	// changeTimeout bounds a change.
	changeTimeout = 30 * time.Second
)

// Call implements [Caller]. There is no answer if no Caddy answers.
func (a *API) Call(ctx context.Context, method, path string, body []byte) (int, []byte, error) {
	target, err := url.ParseRequestURI(path)
	if err != nil {
		return 0, nil, fmt.Errorf("path %q: %w", path, err)
	}
	what, zone, _ := strings.Cut(strings.TrimPrefix(target.Path, root), "/")
	query := target.Query()
	if method == http.MethodGet {
		if row, ok := reads[what]; ok {
			return a.read(ctx, path, what, zone, query, row)
		}
	} else if merge, ok := changes[what]; ok {
		return a.change(ctx, method, path, what, zone, query, body, merge)
	}
	return refuse(http.StatusNotImplemented, "%s %s is about one Caddy: give one --address", method, target.Path)
}

// failure is why a Caddy is not part of an answer.
type failure struct{ address, text string }

func (f failure) String() string { return f.address + ": " + f.text }

// part is the answer of one Caddy.
type part[T any] struct {
	address string
	answer  T
}

// asked is what merging needs besides answers: the parameters, the status of the fleet, as far as
// the path needs it, and who has not answered.
type asked struct {
	query  url.Values
	known  *adminapi.Status
	failed []failure
}

// unanswered returns the failures as answers list them.
func (a *asked) unanswered() (texts []string) {
	for _, f := range a.failed {
		texts = append(texts, f.String())
	}
	return texts
}

// read is how the answers of one path become one.
type read struct {
	timeout time.Duration
	merge   merger
}

// merger makes one answer of those that Caddys have given with success.
type merger func(good []answered, a asked) (any, error)

// reads are the paths, up to a zone in them.
var reads = map[string]read{
	"":          {stateTimeout, as(mergeStatus)},
	"top":       {stateTimeout, ifAsked("zone", as(mergeTop), as(mergeTops))},
	"near":      {stateTimeout, ifAsked("zone", as(mergeNear), as(mergeNears))},
	"history":   {stateTimeout, as(mergeHistory)},
	"clients":   {serversTimeout, ifAsked("prefix", as(mergeMatches), as(mergeFound))},
	"buckets":   {serversTimeout, as(mergeBuckets)},
	"overrides": {serversTimeout, as(mergeOverrides)},
	"audit":     {serversTimeout, as(mergeAudit)},
}

// as returns the merger of answers of one type.
func as[T any](merge func(parts []part[T], a asked) T) merger {
	return func(good []answered, a asked) (any, error) {
		parts := make([]part[T], len(good))
		for i, g := range good {
			parts[i].address = g.address
			if err := json.Unmarshal(g.text, &parts[i].answer); err != nil {
				return nil, fmt.Errorf("answer of the Caddy at %s: %w", g.address, err)
			}
		}
		return merge(parts, a), nil
	}
}

// ifAsked returns the merger of a path whose answers have another type with a parameter than without it.
func ifAsked(parameter string, with, without merger) merger {
	return func(good []answered, a asked) (any, error) {
		if a.query.Has(parameter) {
			return with(good, a)
		}
		return without(good, a)
	}
}

// answered is what one Caddy has answered, or the error that it has not.
type answered struct {
	address string
	status  int
	text    []byte
	err     error
}

func (r *answered) isGood() bool { return r.err == nil && r.status < http.StatusBadRequest }

// why returns the error of an answer that is not good.
func (r *answered) why() string {
	var failure struct{ Error string }
	switch {
	case r.err != nil:
		return r.err.Error()
	case json.Unmarshal(r.text, &failure) == nil && failure.Error != "":
		return failure.Error
	default:
		return fmt.Sprintf("status %d: %s", r.status, strings.TrimSpace(string(r.text)))
	}
}

// ask asks some Caddys at the same time.
func ask(ctx context.Context, members []Member, timeout time.Duration, method, path string, body []byte) []answered {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	all := make([]answered, len(members))
	var calls sync.WaitGroup
	for i, m := range members {
		calls.Go(func() {
			all[i].address = m.Address
			all[i].status, all[i].text, all[i].err = m.Call(ctx, method, path, body)
			if errors.Is(ctx.Err(), context.DeadlineExceeded) && all[i].err != nil {
				all[i].err = fmt.Errorf("no answer within %v", timeout)
			}
		})
	}
	calls.Wait()
	return all
}

// parted returns the good answers, and the failures of the others.
func parted(all []answered) (good []answered, failed []failure) {
	for _, r := range all {
		if r.isGood() {
			good = append(good, r)
		} else {
			failed = append(failed, failure{r.address, r.why()})
		}
	}
	return good, failed
}

// read asks all Caddys and, at the same time, for the status, which tells which stores are shared, and which
// addresses are those of one Caddy. One that does not know the zone that is named has no part that could be missing.
func (a *API) read(ctx context.Context, path, what, zone string, query url.Values, row read) (int, []byte, error) {
	var known *adminapi.Status
	var status sync.WaitGroup
	if what != "" {
		status.Go(func() { known, _ = a.status(ctx) })
	}
	all := ask(ctx, a.members, row.timeout, http.MethodGet, path, nil)
	status.Wait()
	all = slices.DeleteFunc(all, func(r answered) bool { return isTwin(known, r.address) })
	good, failed := parted(all)
	if len(good) == 0 {
		return first(all)
	}
	if zone != "" || query.Has("zone") {
		failed = withoutUnknown(failed, all)
	}
	merged, err := row.merge(good, asked{query, known, failed})
	if err != nil {
		return 0, nil, err
	}
	return encode(http.StatusOK, merged)
}

// withoutUnknown removes the failures of Caddys that do not know what was asked for.
func withoutUnknown(failed []failure, all []answered) []failure {
	return slices.DeleteFunc(failed, func(f failure) bool {
		return slices.ContainsFunc(all, func(r answered) bool {
			return r.address == f.address && r.err == nil && r.status == http.StatusNotFound
		})
	})
}

// isTwin reports whether a Caddy is known to be asked at another address as well, which stands for both.
func isTwin(st *adminapi.Status, address string) bool {
	return st != nil && slices.ContainsFunc(st.Instances, func(i adminapi.Instance) bool { return i.Address == address && i.Same != "" })
}

// status returns the status of the fleet and the Caddys that have answered; nil if none has.
func (a *API) status(ctx context.Context) (*adminapi.Status, []Member) {
	good, failed := parted(ask(ctx, a.members, stateTimeout, http.MethodGet, root, nil))
	merged, err := reads[""].merge(good, asked{failed: failed})
	if len(good) == 0 || err != nil {
		return nil, nil
	}
	st := merged.(adminapi.Status)
	return &st, slices.DeleteFunc(slices.Clone(a.members), func(m Member) bool {
		return isTwin(&st, m.Address) || !slices.ContainsFunc(good, func(g answered) bool { return g.address == m.Address })
	})
}

// storesOf returns the stores in which the zone counts, or all zones if it is empty: those of the
// handlers, where settings of zones are kept, and those of rollouts if they are wanted.
func (a *asked) storesOf(zone string, withRollouts bool) (names []string) {
	if a.known == nil {
		return nil
	}
	for i := range a.known.Zones {
		z := &a.known.Zones[i]
		if zone != "" && z.Name != zone {
			continue
		}
		names = append(names, z.Store)
		if z.Rollout != nil && withRollouts {
			names = append(names, z.Rollout.Store)
		}
	}
	return names
}

// areShared reports whether all stores are known to be shared.
func (a *asked) areShared(names ...string) bool {
	if a.known == nil {
		return false
	}
	for _, name := range names {
		if !isShared(a.known.Stores, name) {
			return false
		}
	}
	return true
}

// first returns what the first Caddy that answers has answered, none of them with success; if none
// answers, the error names all.
func first(all []answered) (int, []byte, error) {
	var errs []string
	for _, r := range all {
		if r.err == nil {
			return r.status, r.text, nil
		}
		errs = append(errs, r.err.Error())
	}
	return 0, nil, fmt.Errorf("no Caddy answers: %s", strings.Join(errs, "; "))
}

func encode(status int, answer any) (int, []byte, error) {
	text, err := json.Marshal(answer)
	return status, text, err
}

// refuse answers with an error.
func refuse(status int, format string, args ...any) (int, []byte, error) {
	return encode(status, map[string]string{"error": fmt.Sprintf(format, args...)})
}
