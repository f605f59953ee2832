package redis

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// info is what a server says about itself.
type info map[string]string

// parseInfo reads the reply to INFO.
func parseInfo(text string) info {
	fields := info{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

// infoTimeout bounds a question about a server's health.
const infoTimeout = time.Second

// info asks the server about itself.
func (l *lane) info(ctx context.Context) (info, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	text, err := l.client.Load().Info(ctx).Result()
	if err != nil {
		return nil, fmt.Errorf("ask %s for INFO: %w", l.addr, err)
	}
	return parseInfo(text), nil
}

func (i info) isReplica() bool { return i["role"] == "slave" }

// history is what replication offsets are about: two servers' offsets can be
// compared if they share one.
func (i info) history() []string { return []string{i["master_replid"], i["master_replid2"]} }

// offset is how much of its primary's history the server has; -1 if it does not
// say.
func (i info) offset() int64 {
	name := "master_repl_offset"
	if i.isReplica() {
		name = "slave_repl_offset"
	}
	n, err := strconv.ParseInt(i[name], 10, 64)
	if err != nil {
		return -1
	}
	return n
}

// isBefore tells whether the server's version is lower than major.minor.
func (i info) isBefore(major, minor int) bool {
	version := i["redis_version"]
	if valkey := i["valkey_version"]; valkey != "" {
		version = valkey
	}
	var has [2]int
	if n, _ := fmt.Sscanf(version, "%d.%d", &has[0], &has[1]); n < 2 {
		return false
	}
	return has[0] < major || has[0] == major && has[1] < minor
}

// skew is how much the server's clock was ahead of this machine's at an instant.
func (i info) skew(at time.Time) (skew time.Duration, ok bool) {
	micros, err := strconv.ParseInt(i["server_time_usec"], 10, 64)
	if err != nil {
		return 0, false
	}
	return time.UnixMicro(micros).Sub(at), true
}
