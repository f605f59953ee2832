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
)

// How bad a problem is, the worst first.
const (
	noPrimary = iota
	chargesWait
	noReplica
	misconfigured
	clockJumped
	doubtfulKey
)

// jumpListed is for how long a problem is that a clock has jumped.
const jumpListed = time.Hour

// problem is a [adminapi.Problem] and how bad it is.
type problem struct {
	adminapi.Problem
	rank int
}

// problems returns what is wrong with the stores, and with the keys of zones, the worst first.
// It calls no server.
func problems(running runningConfig) []adminapi.Problem {
	var all []problem
	for _, handle := range running.Stores() {
		if open := handle.EnterOpen(); open != nil {
			all = append(all, problemsOf(open)...)
			handle.Leave()
		}
	}
	for _, l := range running.Limiters() {
		for _, z := range l.Zones {
			for _, text := range z.KeyProblems() {
				p := adminapi.Problem{Store: l.Store.Name, Zone: z.Name, Text: fmt.Sprintf("key of zone %s: %s", z.Name, text)}
				if !slices.Contains(all, problem{p, doubtfulKey}) {
					all = append(all, problem{p, doubtfulKey})
				}
			}
		}
	}
	slices.SortStableFunc(all, func(a, b problem) int { return cmp.Compare(a.rank, b.rank) })
	listed := []adminapi.Problem{}
	for _, p := range all {
		listed = append(listed, p.Problem)
	}
	return listed
}

func problemsOf(open *stores.Opened) (all []problem) {
	if open.Operable == nil {
		return nil
	}
	if by, at := open.Operable.LastJump(); isListed(by, at) {
		all = append(all, problem{adminapi.Problem{Store: open.Name, Text: "the clock of this machine" + jumped(by, at)}, clockJumped})
	}
	if err := open.OverridesFailed(); err != nil {
		all = append(all, problem{adminapi.Problem{Store: open.Name, Text: "blocks and grants cannot all be read: " + oneLine(err)}, misconfigured})
	}
	for _, shard := range open.Operable.Shards() {
		add := func(rank int, server, format string, args ...any) {
			all = append(all, problem{adminapi.Problem{Store: open.Name, Shard: shard.Name, Server: server, Text: fmt.Sprintf(format, args...)}, rank})
		}
		if !shard.Found || len(shard.Servers) == 0 {
			add(noPrimary, "", "the servers of shard %s are not found", shard.Name)
		}
		for i := range shard.Servers {
			server := &shard.Servers[i]
			rank := noReplica
			if server.Role == store.RolePrimary {
				rank = noPrimary
			}
			name := fmt.Sprintf("the %s %s of shard %s", server.Role, server.Address, shard.Name)
			if isListed(server.Jump, server.JumpedAt) {
				add(clockJumped, server.Address, "the clock of %s%s", name, jumped(server.Jump, server.JumpedAt))
			}
			for _, fault := range server.Faults {
				add(misconfigured, server.Address, "%s is misconfigured: %s", name, fault)
			}
			switch server.State {
			case store.ServerLeftOut:
				if purposes, why := leftOutOf(server); len(purposes) > 0 {
					add(rank, server.Address, "%s is left out of %s, because calls of it fail%s", name, strings.Join(purposes, " and "), why)
				}
			case store.ServerLagging:
				behind := "does not have its primary's data yet"
				if server.LagKnown {
					behind = fmt.Sprintf("is %.1f seconds behind", server.Lag.Seconds())
				}
				add(rank, server.Address, "%s %s, so it is not asked", name, behind)
			case store.ServerForeign:
				add(rank, server.Address, "%s follows another primary, so it is not asked", name)
			}
		}
		if open.Accounts.Delays(shard.Name) {
			add(chargesWait, "", "charges wait for shard %s", shard.Name)
		}
	}
	return all
}

func isListed(jump time.Duration, at time.Time) bool { return jump != 0 && time.Since(at) < jumpListed }

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
