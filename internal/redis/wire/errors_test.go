package wire

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/shardlimit/caddy-shardlimit/store"
)

// reply is a server's error reply.
type reply string

func (r reply) Error() string { return string(r) }

// RedisError implements [redis.Error].
func (reply) RedisError() {}

// TestKindsOfOutcomes: an error of a command has its kind when it leaves the package.
func TestKindsOfOutcomes(t *testing.T) {
	var _ redis.Error = reply("")
	for want, errs := range map[store.ErrorKind][]error{
		store.KindTimeout:     {ErrTimeout, context.DeadlineExceeded, os.ErrDeadlineExceeded, &net.OpError{Op: "read", Err: os.ErrDeadlineExceeded}},
		store.KindConnection:  {io.EOF, net.ErrClosed, redis.ErrClosed, nil, ErrClosed, &net.OpError{Op: "dial", Err: os.ErrDeadlineExceeded}, &net.OpError{Op: "write", Err: errors.New("broken pipe")}, reply("ERR max number of clients reached")},
		store.KindBreaker:     {ErrShardDown},
		store.KindOverload:    {ErrOverload},
		store.KindLoading:     {reply("LOADING Redis is loading the dataset in memory")},
		store.KindReadOnly:    {reply("READONLY You can't write against a read only replica.")},
		store.KindMemory:      {reply("OOM command not allowed when used memory > 'maxmemory'.")},
		store.KindMisconf:     {reply("MISCONF Redis is configured to save RDB snapshots"), reply("REFUSED NOREPLICAS Not enough good replicas to write.")},
		store.KindAuth:        {reply("NOAUTH Authentication required."), reply("WRONGPASS invalid username-password pair"), reply("NOPERM User limiter has no permissions to run the 'del' command"), reply("PARTIAL ERR The user executing the script can't run this command or subcommand"), reply("DENIED Redis is running in protected mode"), reply("REFUSED user_script:145: NOPERM the user may not run pexpire")},
		store.KindBusy:        {reply("BUSY Redis is busy running a script.")},
		store.KindForeignData: {ErrReply, reply("WRONGTYPE the key holds something else than a fixed window")},
		store.KindUnfound:     {ErrNoServers, reply("CLUSTERDOWN Hash slot not served"), reply("MASTERDOWN Link with MASTER is down")},
		store.KindOther:       {errors.New("anything"), context.Canceled, reply("ERR unknown command")},
	} {
		for _, err := range errs {
			if got := store.KindOf(outcomeOf(err)); got != want {
				t.Errorf("%v is %s, want %s", err, got, want)
			}
		}
	}
	// A reply may make a server unfit.
	if got := store.KindOf(fmt.Errorf("redis a: %w: %w", ErrUnfit, classified(reply("LOADING")))); got != store.KindMisconf {
		t.Errorf("an unfit server is %s", got)
	}
}

// outcomeOf returns the outcome of a command that writes and was sent; nil is no reply at all.
func outcomeOf(err error) error {
	sent := new(ScriptCall)
	sent.Begin(NewScript("", ""), "charge", false, "k")
	sent.Ready()
	sent.single()
	sent.Args()
	if err != nil {
		sent.SetErr(err)
	}
	sent.SetOutcome(err)
	return sent.Outcome
}

var errLater = errors.New("not executed, and may run later")

// TestDemotionPointsElsewhere: another server may be the primary.
func TestDemotionPointsElsewhere(t *testing.T) {
	for text, want := range map[reply]bool{"READONLY You can't write against a read only replica.": true, "BUSY Redis is busy running a script.": false} {
		if err := store.NotExecuted(text); pointsElsewhere(err) != want {
			t.Errorf("%v points elsewhere: %v, want %v", err, !want, want)
		}
	}
}

// TestWhatRepliesMean for a command that writes.
func TestWhatRepliesMean(t *testing.T) {
	for want, replies := range map[error][]reply{
		errLater: {
			"READONLY You can't write against a read only replica.", "LOADING Redis is loading the dataset in memory",
			"MASTERDOWN Link with MASTER is down", "CLUSTERDOWN Hash slot not served", "TRYAGAIN Multiple keys request",
			"REFUSED OOM command not allowed when used memory > 'maxmemory'.", "REFUSED MISCONF Errors writing to the AOF file",
			"REFUSED NOREPLICAS Not enough good replicas to write.", "BUSY Redis is busy running a script.",
			"NOSCRIPT No matching script.", "NOAUTH Authentication required.", "ERR max number of clients reached",
		},
		store.ErrFinal: {
			"NOPERM this user has no permissions to run the 'evalsha' command", "REFUSED WRONGTYPE Operation against a key",
			"REFUSED ERR The user executing the script can't run this command or subcommand",
			"REFUSED ERR ACL failure in script: User limiter has no permissions to run the 'hget' command",
			"REFUSED user_script:12: attempt to perform arithmetic on a nil value",
			"REFUSED ERR hash value is not an integer", "REFUSED NOPERM the user may not run pexpire",
			"ERR unknown command 'evalsha'", "unsupported command 'evalsha'",
		},
		store.ErrUncertain: {
			"PARTIAL ERR The user executing the script can't run this command or subcommand", "PARTIAL OOM command not allowed",
			"PARTIAL user_script:12: attempt to perform arithmetic on a nil value",
			"upstream failure", "ERR Connection timed out", "ERR something new",
		},
	} {
		for _, text := range replies {
			sent := new(ScriptCall)
			sent.Begin(NewScript("", ""), "charge", false, "k")
			sent.Ready()
			sent.single()
			sent.Args()
			sent.SetErr(text)
			sent.SetOutcome(text)
			later := errors.Is(sent.Outcome, store.ErrNotExecuted) && !errors.Is(sent.Outcome, store.ErrFinal)
			if later != errors.Is(want, errLater) || sent.isOpen() != later || !later && !errors.Is(sent.Outcome, want) {
				t.Errorf("%q is %v, want: %v", text, sent.Outcome, want)
			}
			if errors.Is(sent.Outcome, store.ErrUncertain) && errors.Is(sent.Outcome, store.ErrNotExecuted) {
				t.Errorf("%q has contradicting outcomes: %v", text, sent.Outcome)
			}
		}
	}
}
