package admin

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

// kind is what sort of problem one is.
type kind = adminapi.ProblemKind

// logsItself are the kinds whose source logs a problem, with more than a text.
var logsItself = []kind{
	adminapi.ProblemNoPrimary, adminapi.ProblemNoReplica, adminapi.ProblemMisconfigured, adminapi.ProblemClockJumped, adminapi.ProblemDoubtfulKey,
}

// jumpListed is for how long a problem is that a clock has jumped.
const jumpListed = time.Hour

// problem is a [adminapi.Problem] of a subject.
type problem struct {
	adminapi.Problem
	of subject
}

// subject is what a problem is about: it is the same problem while its text changes.
type subject struct {
	kind                kind
	store, zone, server string
	// order is the place of a shard in its store, or of a server in its shard.
	order string
	// detail tells apart several problems of one kind.
	detail string
}

// findProblems returns what is wrong with the stores, with the keys of zones and with their
// traffic. It calls no server.
func findProblems(running runningConfig, measured *traffic, now time.Time) (all []problem) {
	for _, handle := range running.Stores() {
		if open := handle.EnterOpen(); open != nil {
			all = append(all, problemsOf(open, now, func() string { return consequences(running, measured, handle.Name) })...)
			handle.Leave()
		}
	}
	all = append(all, measured.problems(running, now)...)
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, text := range z.KeyProblems() {
				all = append(all, problem{
					adminapi.Problem{Store: l.Store.Name, Zone: z.Name, Text: fmt.Sprintf("key of zone %s: %s", z.Name, text)},
					subject{kind: adminapi.ProblemDoubtfulKey, store: l.Store.Name, zone: z.Name, detail: text},
				})
			}
		}
	}
	slices.SortStableFunc(all, func(a, b problem) int { return cmp.Compare(a.of.kind.Rank(), b.of.kind.Rank()) })
	return all
}

// problemsOf returns the problems of a store. consequences says what becomes of requests for which one of
// its shards cannot answer.
func problemsOf(open *stores.Opened, now time.Time, consequences func() string) (all []problem) {
	if open.Operable == nil {
		return nil
	}
	ofStore := func(k kind, detail, format string, args ...any) {
		all = append(all, problem{adminapi.Problem{Store: open.Name, Text: fmt.Sprintf(format, args...)}, subject{kind: k, store: open.Name, detail: detail}})
	}
	if by, at := open.Operable.LastJump(); isListed(by, at, now) {
		ofStore(adminapi.ProblemClockJumped, "", "the clock of this machine%s", jumped(by, at))
	}
	if err := open.OverridesFailed(); err != nil {
		ofStore(adminapi.ProblemDamagedOverrides, "", "some blocks, grants or limits do not hold, or will not: %s: see docs/servers.md for the rights that they need; unblock removes what is damaged", oneLine(err))
	}
	for _, text := range open.Disagreements() {
		ofStore(adminapi.ProblemDisagreement, text, "%s", text)
	}
	for n, shard := range open.Operable.Shards() {
		all = append(all, problemsOfShard(open, &shard, fmt.Sprintf("%06d", n), now, consequences)...)
	}
	return all
}

// problemsOfShard returns what is wrong with a shard, which has that place in its store.
func problemsOfShard(open *stores.Opened, shard *store.ShardFigures, place string, now time.Time, consequences func() string) (all []problem) {
	add := func(k kind, server, detail, format string, args ...any) {
		all = append(all, problem{
			adminapi.Problem{Store: open.Name, Shard: shard.Name, Server: server, Text: fmt.Sprintf(format, args...)},
			subject{k, open.Name, "", server, place, detail},
		})
	}
	if !shard.Found || len(shard.Servers) == 0 {
		add(adminapi.ProblemNoPrimary, "", "", "the servers of shard %s are not found%s", shard.Name, withoutPrimary(shard, consequences()))
	}
	for i := range shard.Servers {
		server := &shard.Servers[i]
		away := adminapi.ProblemNoReplica
		if server.Role == store.RolePrimary {
			away = adminapi.ProblemNoPrimary
		}
		name := fmt.Sprintf("the %s %s of shard %s", server.Role, server.Address, shard.Name)
		if isListed(server.Jump, server.JumpedAt, now) {
			add(adminapi.ProblemClockJumped, server.Address, "", "the clock of %s%s", name, jumped(server.Jump, server.JumpedAt))
		}
		for _, fault := range server.Faults {
			add(adminapi.ProblemMisconfigured, server.Address, fault, "%s is misconfigured: %s", name, fault)
		}
		switch server.State {
		case store.ServerLeftOut:
			if purposes, why := leftOutOf(server); len(purposes) > 0 {
				if server.Role == store.RolePrimary && slices.Contains(purposes, string(wire.PurposeChecks)) {
					why += withoutPrimary(shard, consequences())
				}
				add(away, server.Address, "", "%s is left out of %s, because calls of it fail%s", name, strings.Join(purposes, " and "), why)
			}
		case store.ServerLagging:
			behind := "does not have its primary's data yet"
			if server.LagKnown {
				behind = fmt.Sprintf("is %.1f seconds behind", server.Lag.Seconds())
			}
			add(away, server.Address, "", "%s %s, so it is not asked", name, behind)
		case store.ServerForeign:
			add(away, server.Address, "", "%s follows another primary, so it is not asked", name)
		}
	}
	if open.Accounts.Delays(shard.Name) {
		add(adminapi.ProblemChargesWait, "", "", "charges wait for shard %s", shard.Name)
	}
	return all
}

func isListed(jump time.Duration, at, now time.Time) bool {
	return jump != 0 && now.Sub(at) < jumpListed
}

func jumped(by time.Duration, at time.Time) string {
	return fmt.Sprintf(" has jumped by %s at %s", by.Round(time.Millisecond), at.UTC().Format(time.RFC3339))
}

// leftOutOf returns the purposes for which a server is not called, and ": " with the last error of a
// call, if that is known.
func leftOutOf(server *store.ServerFigures) (purposes []string, why string) {
	for i := range server.Lanes {
		if lane := &server.Lanes[i]; !lane.IsUp() && lane.Breaker != store.BreakerUnfit {
			purposes = append(purposes, lane.Purpose)
			if lane.Fault != nil {
				why = ": " + oneLine(lane.Fault)
			}
		}
	}
	return purposes, why
}
