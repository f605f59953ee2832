package operate

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/shardlimit/caddy-shardlimit/store/redis/wire"
)

// info is the reply to INFO.
type info map[string]string

func parseInfo(text string) info {
	fields := info{}
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimRight(line, "\r\n"), ":"); ok {
			fields[name] = value
		}
	}
	return fields
}

// infoOf asks the server of a lane for INFO.
func infoOf(ctx context.Context, l *wire.Lane) (info, error) {
	ctx, cancel := context.WithTimeout(ctx, infoTimeout)
	defer cancel()
	text, err := l.Info(ctx)
	if err != nil {
		return nil, fmt.Errorf("ask %s for INFO: %w", l.Addr, err)
	}
	return parseInfo(text), nil
}

func (i info) isReplica() bool { return i["role"] == "slave" }

// isDetached reports whether a replica does not follow its primary now.
func (i info) isDetached() bool { return i["master_link_status"] == "down" }

// history returns the IDs of the server's replication history: offsets of servers
// that share one are comparable.
func (i info) history() []string { return []string{i["master_replid"], i["master_replid2"]} }

// offset is the server's position in its primary's history; -1 if unknown.
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

// version names the server's version, and the server if it is Valkey.
func (i info) version() string {
	if valkey := i["valkey_version"]; valkey != "" {
		return "Valkey " + valkey
	}
	return i["redis_version"]
}

// isTested reports whether the tests run with this version, whatever its patches.
func (i info) isTested() bool { return strings.HasPrefix(i.version(), testedVersion+".") }

// skew is the lead of the server's clock over this machine's at an instant.
func (i info) skew(at time.Time) (skew time.Duration, ok bool) {
	micros, err := strconv.ParseInt(i["server_time_usec"], 10, 64)
	if err != nil {
		return 0, false
	}
	return time.UnixMicro(micros).Sub(at), true
}
