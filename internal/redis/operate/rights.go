package operate

import (
	"cmp"
	"context"
	"errors"
	"io"
	"regexp"
	"slices"
	"strings"
	"syscall"

	goredis "github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/internal/redis/wire"
	"github.com/shardlimit/caddy-shardlimit/store"
)

// right is a command that the store sends, or that its scripts run, as an ACL names it,
// with arguments under which it changes nothing. Redis examines the user's rights after
// the number of arguments and before anything else about them.
type right struct {
	command   string
	arguments []any
}

// inKey stands for the probed key among the arguments: a key that never exists.
type inKey struct{}

// absentScript is the SHA of no script, and brokenScript the text of one that Redis
// does not load.
const (
	absentScript = "0000000000000000000000000000000000000000"
	brokenScript = "("
)

// The rights that docs/servers.md documents, one list for each of its rules.
var (
	basicRights = []right{
		{"evalsha", []any{absentScript, 0}},
		{"evalsha_ro", []any{absentScript, 0}},
		{"script|load", []any{brokenScript}},
		{"get", []any{inKey{}}},
		{"getrange", []any{inKey{}, 0, 0}},
		{"mget", []any{inKey{}}},
		{"set", []any{inKey{}, "", "xx"}},
		{"exists", []any{inKey{}}},
		{"hget", []any{inKey{}, "c"}},
		{"hmget", []any{inKey{}, "c"}},
		{"hset", []any{inKey{}, "c", 0, "field without value"}},
		{"hincrby", []any{inKey{}, "c", "no number"}},
		{"hlen", []any{inKey{}}},
		{"hdel", []any{inKey{}, "f"}},
		{"persist", []any{inKey{}}},
		// The next one removes what this one makes.
		{"hsetnx", []any{inKey{}, "c", 0}},
		{"pexpire", []any{inKey{}, 1}},
		{"pttl", []any{inKey{}}},
		{"time", nil},
		{"zadd", []any{inKey{}, "no number", "m"}},
		{"zrem", []any{inKey{}, "m"}},
		{"zcard", []any{inKey{}}},
		{"zcount", []any{inKey{}, 0, 0}},
		{"zrange", []any{inKey{}, 0, 0}},
		{"zmscore", []any{inKey{}, "m"}},
		{"zremrangebyrank", []any{inKey{}, 0, 0}},
		{"ping", nil},
		{"info", []any{"server"}},
	}
	databaseRights = []right{{"select", []any{0}}}
	clusterRights  = []right{{"cluster|shards", nil}, {"cluster|slots", nil}, {"cluster|info", nil}, {"readonly", nil}, {"asking", nil}}
	resetRights    = []right{{"del", []any{inKey{}}}}
	overrideRights = []right{
		{"hscan", []any{inKey{}, 0}},
		{"pexpireat", []any{inKey{}, 1}},
	}
	// sentinelRights are probed by the search for the servers itself.
	sentinelRights = []string{"sentinel|master", "sentinel|replicas", "sentinel|get-master-addr-by-name"}
)

// primaryCommands are those of the lists above that the store never sends to a replica.
var primaryCommands = []string{
	"evalsha", "set", "hset", "hincrby", "hsetnx", "hdel", "pexpire", "persist", "zadd", "zrem", "zremrangebyrank",
}

const moreWork = "it counts, with more work, and less is known of it"

// lesserCommands are those of the basic rights without which checks and charges go on, by what is so
// then.
var lesserCommands = map[string]string{
	"evalsha_ro": moreWork, "mget": moreWork, "hlen": moreWork, "hsetnx": moreWork, "persist": moreWork, "ping": moreWork,
	"getrange": "zones and weights of other Caddys are not compared",
	"pttl":     "penalties fail",
	"zmscore":  "refunds of costs above 1, and reservations, fail",
	"hdel":     "blocks, grants and reservations fail",
}

// executed matches the errors of Redis about the probes' arguments.
var executed = regexp.MustCompile(`(?i)wrong number of arguments|not an integer|not a valid float|compiling script|invalid ttl|cluster support disabled`)

// probe returns the command that finds out whether the user has the right.
func (r right) probe(key string) *goredis.Cmd {
	var words []any
	for word := range strings.SplitSeq(r.command, "|") {
		words = append(words, word)
	}
	for _, argument := range r.arguments {
		if argument == (inKey{}) {
			argument = key
		}
		words = append(words, argument)
	}
	return goredis.NewCmd(context.Background(), words...)
}

// probed is what the probes of rights found out.
type probed struct {
	// missing are the commands that the user may not run, and unknown those that the
	// server does not have.
	missing, unknown []string
	// isKeyDenied is set if the user may not use the key.
	isKeyDenied bool
	// refusals are the replies with which the server refuses writes for now.
	refusals []error
	// unclear are the commands with replies that say nothing about rights, and unclearReply
	// is the first such reply.
	unclear      []string
	unclearReply error
}

// probeRights probes rights in one pipeline or, where the connection is closed on one that a proxy
// does not know, one by one. The error is that of the connection.
func probeRights(ctx context.Context, client *goredis.Client, key string, rights []right) (found probed, err error) {
	if found, err = probeTogether(ctx, client, key, rights); !isClosed(err) {
		return found, err
	}
	found = probed{}
	for i, r := range rights {
		one, err := probeTogether(ctx, client, key, rights[i:i+1])
		switch {
		case isClosed(err):
			found.unknown = append(found.unknown, r.command)
		case err != nil:
			return probed{}, err
		default:
			found.add(one)
		}
	}
	return found, nil
}

// isClosed reports whether the server has closed the connection.
func isClosed(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func probeTogether(ctx context.Context, client *goredis.Client, key string, rights []right) (found probed, err error) {
	pipe := client.Pipeline()
	cmds := make([]*goredis.Cmd, len(rights))
	for i, r := range rights {
		cmds[i] = r.probe(key)
		_ = pipe.Process(ctx, cmds[i])
	}
	_, execErr := pipe.Exec(ctx)
	if execErr != nil && !wire.IsReply(execErr) {
		return probed{}, execErr
	}
	for i, r := range rights {
		err := cmds[i].Err()
		if err == nil && cmds[i].Val() == nil {
			// go-redis sets no error on commands if the setup of the connection failed.
			err = execErr
		}
		if err != nil && !wire.IsReply(err) {
			return probed{}, err
		}
		found.note(r.command, err)
	}
	return found, nil
}

// add adds what another pipeline found out.
func (p *probed) add(other probed) {
	p.missing = append(p.missing, other.missing...)
	p.unknown = append(p.unknown, other.unknown...)
	p.isKeyDenied = p.isKeyDenied || other.isKeyDenied
	p.refusals = append(p.refusals, other.refusals...)
	p.unclear = append(p.unclear, other.unclear...)
	p.unclearReply = cmp.Or(p.unclearReply, other.unclearReply)
}

// note adds the reply to a probe.
func (p *probed) note(command string, err error) {
	m, ok := wire.MeaningOf(err)
	switch {
	case !ok:
	case m.Kind == store.KindAuth && isAboutCommand(err):
		p.missing = append(p.missing, command)
	case m.Kind == store.KindAuth:
		p.isKeyDenied = true
	case isUnknownCommand(err):
		p.unknown = append(p.unknown, command)
	case (m.Kind == store.KindMemory || m.Kind == store.KindMisconf) && !slices.ContainsFunc(p.refusals, func(other error) bool { return other.Error() == err.Error() }):
		p.refusals = append(p.refusals, err)
	case isUnclear(m, err):
		if p.unclear = append(p.unclear, command); p.unclearReply == nil {
			p.unclearReply = err
		}
	}
}

// isUnclear reports whether a reply says nothing about rights: the server executes nothing
// for now, or the reply is none of Redis, such as a proxy's.
func isUnclear(m wire.Meaning, err error) bool {
	switch {
	case errors.Is(err, goredis.Nil):
		return false
	case m.Kind == store.KindBusy, m.Kind == store.KindLoading, m.Kind == store.KindConnection:
		return true
	default:
		return m.Fate == wire.Uncertain && !executed.MatchString(err.Error())
	}
}

// isAboutCommand reports whether a refusal for lack of rights is about a command; else it
// is about a key.
func isAboutCommand(err error) bool { return strings.Contains(err.Error(), " command") }

// isUnknownCommand reports whether the server lacks the command, or a part of it.
func isUnknownCommand(err error) bool {
	var reply goredis.Error
	if !errors.As(err, &reply) {
		return false
	}
	// Some proxies leave out ERR.
	text := strings.TrimPrefix(reply.Error(), "ERR ")
	return strings.HasPrefix(text, "unknown command") || strings.HasPrefix(text, "unknown subcommand") || strings.HasPrefix(text, "unsupported command '")
}
