package redistest

import (
	"context"
	"fmt"
	"strings"
	"time"

	goredis "github.com/redis/go-redis/v9"
)

// options are those of one of n sentinels. It fails if a sentinel would write a
// configuration that it cannot read.
func (o SentinelOptions) options(master string, primary *Server, n int) (Options, error) {
	if o.TLS == nil {
		o.TLS = primary.login.certificate
	}
	if o.AuthUser == "" && o.AuthPass == "" {
		o.AuthUser, o.AuthPass = primary.login.username, primary.login.password
	}
	if o.Quorum == 0 {
		o.Quorum = n/2 + 1
	}
	if o.DownAfter == 0 {
		o.DownAfter = defaultDownAfter
	}
	if o.FailoverTimeout == 0 {
		o.FailoverTimeout = defaultFailoverTimeout
	}
	for _, word := range []string{master, o.Username, o.Password, o.AuthUser, o.AuthPass} {
		// Sentinel reads quotes and escapes, but never writes them.
		if strings.ContainsFunc(word, func(r rune) bool { return r <= ' ' || strings.ContainsRune(`"'\`, r) }) {
			return Options{}, fmt.Errorf("configure a sentinel: %q has blanks or quotes", word)
		}
	}
	return Options{
		// Its log is the only account of what a sentinel saw and did.
		Args:     []string{"--loglevel", "notice"},
		Username: o.Username,
		Password: o.Password,
		TLS:      o.TLS,
		sentinel: o.lines(master, primary),
	}, nil
}

// lines are what a sentinel's configuration file says at first. A sentinel
// keeps there what it learns.
func (o SentinelOptions) lines(master string, primary *Server) []string {
	lines := []string{
		"sentinel announce-ip " + loopback,
		fmt.Sprintf("sentinel monitor %s %s %d %d", master, loopback, primary.port.number, o.Quorum),
		fmt.Sprintf("sentinel down-after-milliseconds %s %d", master, o.DownAfter.Milliseconds()),
		fmt.Sprintf("sentinel failover-timeout %s %d", master, o.FailoverTimeout.Milliseconds()),
		fmt.Sprintf("sentinel parallel-syncs %s 1", master),
	}
	if o.AuthPass != "" {
		lines = append(lines, fmt.Sprintf("sentinel auth-pass %s %s", master, o.AuthPass))
	}
	if o.AuthUser != "" {
		lines = append(lines, fmt.Sprintf("sentinel auth-user %s %s", master, o.AuthUser))
	}
	return append(lines, o.access()...)
}

// access are the lines about who may use the sentinels.
func (o SentinelOptions) access() []string {
	if o.Password == "" {
		return nil
	}
	lines := []string{fmt.Sprintf("sentinel sentinel-pass %s", o.Password)}
	if o.Username == "" {
		return append(lines, fmt.Sprintf("requirepass %s", o.Password))
	}
	return append(lines,
		fmt.Sprintf("sentinel sentinel-user %s", o.Username),
		"user default off",
		fmt.Sprintf("user %s on >%s ~* &* +@all", o.Username, o.Password))
}

// hurrySentinel makes a sentinel do often what else takes several seconds: to
// find replicas and sentinels, to turn an old primary into a replica, and to
// trust its clock again after it was paused. It forgets that when it ends.
func hurrySentinel(ctx context.Context, client *goredis.Client) error {
	args := []any{"SENTINEL", "DEBUG"}
	for _, period := range []struct {
		name   string
		length time.Duration
	}{
		{"INFO-PERIOD", 500 * time.Millisecond},
		// A replica is promoted only if what it said of itself is no older than
		// five of these, and while its primary is down it is asked once a second.
		{"PING-PERIOD", 300 * time.Millisecond},
		{"ASK-PERIOD", 100 * time.Millisecond},
		// After four of these a sentinel makes a primary that it takes for an old
		// one a replica. The sentinel that has promoted it may need a second to see
		// that, and then one of these to tell the others.
		{"PUBLISH-PERIOD", 600 * time.Millisecond},
		{"TILT-PERIOD", time.Second},
	} {
		args = append(args, period.name, period.length.Milliseconds())
	}
	if err := client.Do(ctx, args...).Err(); err != nil {
		return fmt.Errorf("make the sentinel hurry: %w", err)
	}
	return nil
}
