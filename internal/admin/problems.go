package admin

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/internal/adminapi"
	"github.com/shardlimit/caddy-shardlimit/internal/stores"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// kind is what sort of problem one is.
type kind = adminapi.ProblemKind

// logsItself are the kinds whose source logs a problem, with more than a text.
var logsItself = []kind{
	adminapi.ProblemNoPrimary, adminapi.ProblemStoreErrors, adminapi.ProblemNoReplica, adminapi.ProblemMisconfigured, adminapi.ProblemForeignServer,
	adminapi.ProblemServerReplaced, adminapi.ProblemClockJumped, adminapi.ProblemDoubtfulKey, adminapi.ProblemDoubtfulConfig,
}

const (
	// jumpListed is how long a jump of a clock, or a replaced server, stays a problem.
	jumpListed = time.Hour
	// errorListed is how long an unanswered call stays a problem.
	errorListed = 10 * time.Second
)

// remedies are what to do about the errors of a shard, by their kinds. Servers that are left out or are no
// Redis have problems of their own.
var remedies = map[store.ErrorKind]string{
	store.KindTimeout:     "see whether the server, or the network, is slow, or raise check_timeout",
	store.KindConnection:  "see that the server runs, and that its maxclients suffices",
	store.KindOverload:    "add shards",
	store.KindLoading:     "wait until the server has read its data",
	store.KindBusy:        "end its script (SCRIPT KILL), and find the program that runs it",
	store.KindReadOnly:    "the primary is a replica: end the failover, or correct the address",
	store.KindMemory:      "give Redis more memory, set max_new_buckets, or shorten windows",
	store.KindMisconf:     "see in its log why it cannot persist, or lacks replicas",
	store.KindAuth:        "let caddy rate-limit check list the rights that its user lacks",
	store.KindForeignData: "let no other program write keys with this key_prefix",
	store.KindUnfound:     "see that its primary runs, and that the sentinels or the cluster name one",
}

// overridesRemedy returns what to do about overrides that cannot be read, after a separator.
func overridesRemedy(err error) string {
	switch kind := store.KindOf(err); {
	case errors.Is(err, store.ErrDamaged):
		return ": unblock, ungrant or unset with its client key removes what is damaged"
	case kind == store.KindAuth:
		return ": see docs/servers.md for the rights that they need"
	case kind == store.KindForeignData:
		return ": another program wrote that key: delete it"
	case kind == store.KindConnection:
		return ": see in the server's log why it ends the connection; client-output-buffer-limit normal may be too low"
	}
	return ""
}

// withRemedy returns the error of a call for a purpose, with its remedy, after a separator.
func withRemedy(err error, purpose string) string {
	text, kind := ": "+oneLine(err), store.KindOf(err)
	remedy := remedies[kind]
	switch {
	case errors.As(err, new(*net.DNSError)):
		remedy = "correct the name of the host, or the DNS"
	case kind == store.KindTimeout && purpose == store.PurposeCharges:
		remedy = "see whether the server, or the network, is slow"
	}
	if remedy != "" && !errors.As(err, new(interface{ HasRemedy() })) {
		text += ": " + remedy
	}
	return text
}

const (
	// inMemoryNow is the problem of a config that has lost its stores.
	inMemoryNow    = "zones that an earlier config of this Caddy counted in Redis count in its memory, because no store is configured: " + inMemoryRemedy
	inMemoryRemedy = "configure it again, or write store memory if that is meant"
)

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
	if running.CountsInMemoryNow() {
		all = append(all, problem{
			adminapi.Problem{Store: stores.DefaultName, Text: inMemoryNow},
			subject{kind: adminapi.ProblemDisagreement, store: stores.DefaultName, detail: inMemoryNow},
		})
	}
	all = append(all, measured.problems(now)...)
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
	for i := range running.Warnings() {
		w := &running.Warnings()[i]
		all = append(all, problem{
			adminapi.Problem{Store: w.Store, Zone: w.Zone, Text: w.Text()},
			subject{kind: adminapi.ProblemDoubtfulConfig, store: w.Store, zone: w.Zone, detail: w.Text()},
		})
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
		ofStore(adminapi.ProblemDamagedOverrides, "", "some blocks, grants or limits do not hold, or will not: %s%s", oneLine(err), overridesRemedy(err))
	}
	for _, text := range open.Disagreements() {
		ofStore(adminapi.ProblemDisagreement, text, "%s", text)
	}
	shards := open.Operable.Shards()
	for _, t := range store.Twins(shards) {
		ofStore(adminapi.ProblemMisconfigured, t.Address, "shards %s (%s) and %s (%s) are the same server: give each its own, or remove one of the shards", t.OtherShard, t.OtherAddress, t.Shard, t.Address)
	}
	for n, shard := range shards {
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
	switch {
	case !shard.Found && shard.SearchFault != nil:
		add(adminapi.ProblemNoPrimary, "", "", "the servers of shard %s are not found: %s%s", shard.Name, oneLine(shard.SearchFault), withoutPrimary(shard, consequences()))
	case shard.Unowned > 0:
		add(adminapi.ProblemNoPrimary, "", "", "%d slots of shard %s have no primary (see CLUSTER SLOTS)%s", shard.Unowned, shard.Name, after(consequences()))
	}
	if shard.NoQuorum != nil {
		add(adminapi.ProblemNoQuorum, "", "", "shard %s: %s", shard.Name, oneLine(shard.NoQuorum))
	}
	for i := range shard.Sources {
		// NoQuorum reports silent sources together.
		if source := &shard.Sources[i]; source.State == store.ServerForeign {
			add(adminapi.ProblemForeignServer, source.Address, "", "%s, which shard %s was given, is left out: %s", source.Address, shard.Name, source.Fault)
		}
	}
	if at := shard.ReplacedAt; now.Sub(at) < jumpListed {
		add(adminapi.ProblemServerReplaced, "", "", "other servers, which have nothing in common with those before, took the place of shard %s's at %s, so clients have the counts there: if they are not the shard's, correct its addresses, or where these lead", shard.Name, at.UTC().Format(time.RFC3339))
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
		if server.Unidentified != "" {
			add(adminapi.ProblemUnidentified, server.Address, "", "%s is not identified: %s", name, server.Unidentified)
		}
		switch {
		case server.Fault != nil:
			add(away, server.Address, "", "%s is left out: %s", name, oneLine(server.Fault))
		case server.State == store.ServerLeftOut:
			if purposes, why := leftOutOf(server); len(purposes) > 0 {
				if server.Role == store.RolePrimary && slices.Contains(purposes, store.PurposeChecks) {
					why += withoutPrimary(shard, consequences())
				}
				add(away, server.Address, "", "%s is left out of %s, because calls of it fail%s", name, strings.Join(purposes, " and "), why)
			}
		case server.State == store.ServerLagging:
			behind := "does not have its primary's data yet"
			if server.LagKnown {
				behind = fmt.Sprintf("is %.1f seconds behind", server.Lag.Seconds())
			}
			add(away, server.Address, "", "%s %s, so it is not asked", name, behind)
		case server.State == store.ServerForeign:
			add(away, server.Address, "", "%s follows another primary, so it is not asked", name)
		}
	}
	isAway := slices.ContainsFunc(all, func(p problem) bool { return p.of.kind == adminapi.ProblemNoPrimary })
	if err := open.Unanswered(shard.Name, now.Add(-errorListed)); err != nil && !isAway {
		add(adminapi.ProblemStoreErrors, "", "", "shard %s does not answer all checks and takes%s%s", shard.Name, withRemedy(err, store.PurposeChecks), after(consequences()))
	}
	if err := open.Lost(shard.Name, now.Add(-errorListed)); err != nil {
		add(adminapi.ProblemStoreErrors, "", "lost", "charges, refunds or penalties of shard %s are lost%s; what they cost is not counted", shard.Name, withRemedy(err, store.PurposeCharges))
	}
	if err := open.Accounts.Delays(shard.Name); err != nil {
		add(adminapi.ProblemChargesWait, "", "", "charges wait for shard %s%s; meanwhile only this Caddy counts them", shard.Name, withRemedy(err, store.PurposeCharges))
	}
	return all
}

func isListed(jump time.Duration, at, now time.Time) bool {
	return jump != 0 && now.Sub(at) < jumpListed
}

func jumped(by time.Duration, at time.Time) string {
	return fmt.Sprintf(" has jumped by %s at %s", by.Round(time.Millisecond), at.UTC().Format(time.RFC3339))
}

// leftOutOf returns the purposes whose calls skip the server, and the last error with its remedy, or "".
func leftOutOf(server *store.ServerFigures) (purposes []string, why string) {
	for i := range server.Lanes {
		if lane := &server.Lanes[i]; !lane.IsUp() && lane.Breaker != store.BreakerUnfit {
			purposes = append(purposes, lane.Purpose)
			if lane.Fault != nil {
				why = withRemedy(lane.Fault, lane.Purpose)
			}
		}
	}
	return purposes, why
}
